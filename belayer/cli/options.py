"""Options that several verbs share, and the journal that they name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from belayer.errors import InputError, UnknownStreamError
from belayer.ids import StreamId, StreamKind, checked_name, nearest

if TYPE_CHECKING:
    from belayer.journal.store import JournalStore

Url = Annotated[
    str | None,
    typer.Option(
        envvar="BELAYER_JOURNAL_URL",
        help="The journal: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://.",
    ),
]
Namespace = Annotated[str, typer.Option(envvar="BELAYER_NAMESPACE", help="Whose keys on the server.")]
OwnerPid = Annotated[
    int | None, typer.Option(envvar="BELAYER_OWNER_PID", help="End when this process has ended, engines included.")
]
Durability = Annotated[str, typer.Option(envvar="BELAYER_DURABILITY", help="memory, everysec, fsync or replicated.")]
ArchiveUrl = Annotated[
    str | None,
    typer.Option(
        "--archive",
        envvar="BELAYER_ARCHIVE_URL",
        help="Where finished trajectories are: a folder, s3://bucket/folder, ...",
    ),
]
ExportFile = Annotated[
    Path | None, typer.Option("--file", help="An exported file instead of a server.", dir_okay=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]

_TIMEOUT_S = 10.0


@asynccontextmanager
async def open_journal(url: str | None, namespace: str, archive: str | None = None) -> AsyncIterator[JournalStore]:
    """The journal that the options name, with what is in the archive when one is named.

    InputError when they name no journal; JournalUnavailableError after 10 s.
    """
    from belayer.journal.connect import open_store, with_archive

    if not url:
        raise InputError("no journal is named; give --url, BELAYER_JOURNAL_URL or journal_url in belayer.toml")
    store = await with_archive(await open_store(url, namespace=namespace, timeout_s=_TIMEOUT_S), archive, namespace)
    try:
        yield store
    finally:
        await store.close()


async def find_streams(store: JournalStore, wanted: Sequence[str]) -> list[StreamId]:
    """The streams that were asked for: `kind/name`, or a bare name for all streams of that name; all when none were."""
    there = list(await store.streams())
    if not wanted:
        return there
    found: list[StreamId] = []
    for text in wanted:
        matching = [stream for stream in there if text in (str(stream), stream.name)]
        if not matching:
            raise unknown(str(StreamId.parse(text)) if "/" in text else checked_name(text), there)
        found += [stream for stream in matching if stream not in found]
    return sorted(found)


async def find_stream(store: JournalStore, text: str) -> StreamId:
    """One stream: `kind/name`, or a bare name, which is the trajectory's before any other stream's of that name."""
    kinds = (StreamKind.TRAJECTORY, StreamKind.WORKER, StreamKind.RUN, StreamKind.SANDBOX)
    named = [StreamId.parse(text)] if "/" in text else [StreamId(kind, checked_name(text)) for kind in kinds]
    for stream in named:
        if await store.last(stream) is not None:
            return stream
    raise unknown(str(named[0]), await store.streams())


def unknown(text: str, there: Iterable[StreamId]) -> UnknownStreamError:
    """What to raise for a stream that is not there, with those that may have been meant."""
    kind, _, name = text.rpartition("/")
    near = nearest(name, (stream.name for stream in there if kind in ("", stream.kind)))
    return UnknownStreamError(text, near=near)
