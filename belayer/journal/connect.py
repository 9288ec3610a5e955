"""Opening the journal: a server by URL, or one of our own when there is none."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

import hiredis

from belayer.errors import InputError, JournalUnavailableError
from belayer.ids import checked_name
from belayer.journal.batching import WAITING_BYTES
from belayer.journal.durability import Durability
from belayer.journal.embedded import EmbeddedServer, shipped_server
from belayer.journal.held import HELD_BYTES
from belayer.journal.keys import Keys, layout_key
from belayer.journal.link import LinkLostError, NotReadyError, once_ready, pack
from belayer.journal.packing import checked_form
from belayer.journal.redis_store import RedisStore
from belayer.journal.replies import ASK, is_transient
from belayer.journal.route import Routes, parse_routes
from belayer.journal.sealing import keyring_of
from belayer.journal.server import REPLY_S
from belayer.journal.store import JournalStore

S = TypeVar("S", bound=RedisStore)
URL_VARIABLE = "BELAYER_JOURNAL_URL"
FORM_VARIABLE = "BELAYER_TOKEN_FORM"
CLUSTER_SHARDS = 16
"""Shards of a new namespace in a cluster, when nobody says otherwise: enough that each of a few nodes has some."""


async def open_store(
    url: str | None = None,
    *,
    durability: str = "everysec",
    namespace: str = "default",
    shards: int | None = None,
    replicas: int = 1,
    folder: Path | str | None = None,
    timeout_s: float = 30.0,
    waiting_bytes: int = WAITING_BYTES,
    held_bytes: int = HELD_BYTES,
    encryption: str | None = None,
    token_form: str | None = None,
) -> RedisStore:
    """The journal at `url`, else at $BELAYER_JOURNAL_URL, else of an embedded server; `close` it at the end.

    `shards` None: as many as the namespace has; a new one gets 1, in a cluster CLUSTER_SHARDS. Of what was
    acknowledged in the last seconds up to `held_bytes` are held, to be stored again when a server has lost them.
    `token_form`: how token chunks are stored: bf16, zstd or bf16+zstd, else $BELAYER_TOKEN_FORM, else plain.
    `encryption`: the reference to the keys of token payloads, else $BELAYER_ENCRYPTION_KEYS (docs/security.md).
    The embedded server keeps its data in `folder`; without one it uses a temporary folder and everything is gone when
    the store is closed. InputError, ServerRefusedError, ServerStartError or JournalUnavailableError, each one line.
    """

    url = url or os.environ.get(URL_VARIABLE) or None
    mode = checked_durability(durability)
    if shards is not None and not 1 <= shards <= 1024:
        raise InputError(f"{shards} shards; expected 1 to 1024")
    checked_name(namespace)
    keyring = keyring_of(encryption)
    form = checked_form(token_form or os.environ.get(FORM_VARIABLE) or "plain")

    async def started(at: str, kind: type[S]) -> S:
        routes = parse_routes(at)
        keys = Keys(namespace, shards or await _shards(routes, namespace, timeout_s))
        limits = {"waiting_bytes": waiting_bytes, "held_bytes": held_bytes}
        store = kind(
            routes, keys, mode, replicas=replicas, timeout_s=timeout_s, keyring=keyring, token_form=form, **limits
        )
        try:
            await store.start()
        except BaseException:
            await store.close()
            raise
        return store

    if url is not None:
        return await started(url, RedisStore)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(own_server(folder, mode))
        store = await started(server.url, _OwningStore)
        store.owned = stack.pop_all()
    return store


async def with_archive(store: JournalStore, archive: str | None, namespace: str) -> JournalStore:
    """The store, read across the archive when one is named.

    ArchiveError, InputError when that cannot be opened; the store is then closed.
    """
    if not archive:
        return store
    from belayer.journal.archive import open_archive
    from belayer.journal.archived_store import ArchivedStore

    try:
        return ArchivedStore(store, open_archive(archive, namespace))
    except BaseException:
        await store.close()
        raise


async def _shards(routes: Routes, namespace: str, timeout_s: float) -> int:
    """How many shards the namespace has, or is to have. What the server refuses is said later, by its check."""
    began = time.monotonic()
    try:
        stored: bytes | None = await once_ready(timeout_s)(
            _layout, routes, layout_key(namespace), min(timeout_s, REPLY_S)
        )
    except LinkLostError as error:
        raise JournalUnavailableError(routes.shown, time.monotonic() - began, error.cause) from None
    return int(stored) if stored else CLUSTER_SHARDS if routes.is_cluster else 1


async def _layout(routes: Routes, key: bytes, timeout_s: float) -> bytes | None:
    route = routes.of(key)
    link = await route.open("belayer", timeout_s)
    try:
        (stored,) = await link.exchange([pack(("GET", key))], 1, timeout_s)
    finally:
        link.close()
    misled = not routes.is_cluster and str(stored).startswith(("MOVED ", ASK))  # the check says what the URL should be
    if isinstance(stored, hiredis.ReplyError) and is_transient(stored) and not misled:
        route.redirected(str(stored))
        raise NotReadyError(str(stored))
    return stored if isinstance(stored, bytes) else None


def checked_durability(name: str) -> Durability:
    """The mode of that name, or InputError."""
    try:
        return Durability(name)
    except ValueError:
        raise InputError(f"{name!r} is not a durability mode; expected one of {', '.join(Durability)}") from None


def own_server(folder: Path | str | None, durability: Durability) -> EmbeddedServer:
    """A server that can keep the mode; not started. Without a folder its data goes when it stops."""
    executable, settings = None, {}
    if durability is Durability.FSYNC:
        executable, settings = shipped_server(), {"appendfsync": "always"}
    temporary = folder is None
    return EmbeddedServer(
        tempfile.mkdtemp(prefix="belayer-journal-") if folder is None else folder,
        executable=executable,
        settings=settings,
        remove_folder=temporary,
    )


class _OwningStore(RedisStore):
    """A store whose server stops with it."""

    owned: AsyncExitStack | None = None

    async def close(self) -> None:
        await super().close()
        if self.owned is not None:
            await self.owned.aclose()
