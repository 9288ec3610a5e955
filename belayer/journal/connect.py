"""Opening the journal: a server by URL, or one of our own when there is none."""

from __future__ import annotations

import os
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

from belayer.errors import InputError
from belayer.journal.address import parse_address
from belayer.journal.batching import WAITING_BYTES
from belayer.journal.durability import Durability
from belayer.journal.embedded import EmbeddedServer, shipped_server
from belayer.journal.keys import Keys
from belayer.journal.redis_store import RedisStore

S = TypeVar("S", bound=RedisStore)
URL_VARIABLE = "BELAYER_JOURNAL_URL"


async def open_store(
    url: str | None = None,
    *,
    durability: str = "everysec",
    namespace: str = "default",
    shards: int = 1,
    replicas: int = 1,
    folder: Path | str | None = None,
    timeout_s: float = 30.0,
    waiting_bytes: int = WAITING_BYTES,
) -> RedisStore:
    """The journal at `url`, else at $BELAYER_JOURNAL_URL, else of an embedded server; `close` it at the end.

    The embedded server keeps its data in `folder`; without one it uses a temporary folder and everything is gone when
    the store is closed. InputError, ServerRefusedError, ServerStartError or JournalUnavailableError, each one line.
    """

    def made(at: str, kind: type[S]) -> S:
        return kind(parse_address(at), keys, mode, replicas=replicas, timeout_s=timeout_s, waiting_bytes=waiting_bytes)

    url = url or os.environ.get(URL_VARIABLE) or None
    mode = checked_durability(durability)
    if not 1 <= shards <= 1024:
        raise InputError(f"{shards} shards; expected 1 to 1024")
    keys = Keys(namespace, shards)
    if url is not None:
        store = made(url, RedisStore)
        await _start(store)
        return store
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(own_server(folder, mode))
        store = made(server.url, _OwningStore)
        await _start(store)
        store.owned = stack.pop_all()
    return store


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


async def _start(store: RedisStore) -> None:
    try:
        await store.start()
    except BaseException:
        await store.close()
        raise


class _OwningStore(RedisStore):
    """A store whose server stops with it."""

    owned: AsyncExitStack | None = None

    async def close(self) -> None:
        await super().close()
        if self.owned is not None:
            await self.owned.aclose()
