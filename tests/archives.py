"""What tests of the archive need: stores and storages that stop before or after any step, and finished trajectories."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from belayer import ids
from belayer.ids import StreamId, StreamKind
from belayer.journal.archive import Archive
from belayer.journal.archive_storage import LocalStorage, Storage, Stored
from belayer.journal.archived_store import ArchivedStore
from belayer.journal.codec import Entry, Recorded
from belayer.journal.columns import pack_logprobs, pack_token_ids
from belayer.journal.events import (
    EpochStarted,
    GenerationFinished,
    GenerationStarted,
    SandboxCreated,
    SandboxRemoved,
    SandboxSpec,
    StreamArchived,
    TokensAppended,
    TrajectoryFinished,
    TrajectoryStarted,
)
from belayer.journal.store import JournalStore
from belayer.journal.writer import StreamWriter, read_events, take_over

ARCHIVER = "actors/archiver"
ARCHIVERS = (ARCHIVER, "archive/")
"""How the writers of marks are called in tests and by `belayer archive run`."""


class Stopped(BaseException):
    """The process ended here."""


class Steps:
    """Counts steps and stops at one of them, before it is done or right after; from then on nothing is done."""

    def __init__(self, stop_at: int | None = None, after: bool = False) -> None:
        self.count = 0
        self._stop_at = stop_at
        self._after = after
        self._stopped = False

    def before(self) -> int:
        """The step's number, for `after`."""
        self._stop_if(self._stopped or (self.count == self._stop_at and not self._after))
        self.count += 1
        return self.count - 1

    def after(self, number: int) -> None:
        self._stop_if(self._stopped or (number == self._stop_at and self._after))

    def _stop_if(self, here: bool) -> None:
        if here:
            self._stopped = True
            raise Stopped


class SteppedStore(ArchivedStore):
    """A store whose writes are steps. Reads change nothing, so stopping there is stopping before the next write."""

    def __init__(self, live: JournalStore, steps: Steps) -> None:
        super().__init__(live, archive=None)  # type: ignore[arg-type]
        self._steps = steps

    async def read(self, stream: StreamId, after_sequence: int = 0, limit: int = 1000) -> list[Entry]:
        return await self.live.read(stream, after_sequence, limit)

    async def take_over(self, stream: StreamId, after: Entry | None, entry: Entry) -> Entry | None:
        return await self._stepped(self.live.take_over(stream, after, entry))

    async def trim(self, stream: StreamId, first: Entry) -> None:
        await self._stepped(self.live.trim(stream, first))

    async def _stepped(self, write: Coroutine[Any, Any, Any]) -> Any:
        try:
            number = self._steps.before()
        except Stopped:
            write.close()
            raise
        outcome = await write
        self._steps.after(number)
        return outcome


class SteppedStorage:
    """A folder whose writes are steps; one that stops within a write leaves half a file beside its place."""

    def __init__(self, folder: Path, steps: Steps) -> None:
        self._storage: Storage = LocalStorage(folder)
        self._folder = folder
        self._steps = steps

    @property
    def shown(self) -> str:
        return self._storage.shown

    def put(self, name: str, content: bytes) -> None:
        try:
            number = self._steps.before()
        except Stopped:
            self._folder.mkdir(exist_ok=True)
            (self._folder / f"{name}.partial").write_bytes(content[: len(content) // 2])
            raise
        self._storage.put(name, content)
        self._steps.after(number)

    def read(self, name: str, start: int, end: int | None) -> bytes:
        return self._storage.read(name, start, end)

    def segments(self) -> list[Stored]:
        return self._storage.segments()

    def remove(self, name: str) -> None:
        self._storage.remove(name)


def across(live: JournalStore, folder: Path, namespace: str) -> ArchivedStore:
    """A reader's view of server and archive, with nothing cached."""
    return ArchivedStore(live, Archive(LocalStorage(folder), namespace))


async def write_trajectory(store: JournalStore, name: str, chunks: int = 2) -> StreamWriter:
    """A trajectory with one generation of `chunks` chunks, and a sandbox. Not ended."""
    writer, _ = await take_over(store, ids.trajectory(name), "rollout")
    await writer.append(TrajectoryStarted("run", "task", pack_token_ids([1, 2])))
    await writer.append(GenerationStarted(1, "", ""))
    for number in range(chunks):
        columns = (pack_token_ids(range(8)), pack_logprobs([-0.5] * 8), b"\x01" * 8)
        await writer.append(TokensAppended(1, 8 * number, 8, *columns, 0))
    await writer.append(GenerationFinished(1, 8 * chunks, "stop"))
    box, _ = await take_over(store, ids.sandbox(name), "actors/x")
    await box.append(SandboxCreated("i-1", "c0ffee", "sha256:0", "host", 1, 1, "run", SandboxSpec("image")))
    return writer


async def end_trajectory(store: JournalStore, name: str, writer: StreamWriter) -> None:
    """The trajectory is finished, and its sandbox removed."""
    await writer.append(TrajectoryFinished("done", 1.0))
    box, _ = await take_over(store, ids.sandbox(name), "actors/y")
    await box.append(SandboxRemoved("i-1", "the trajectory is finished"))


async def history(store: JournalStore, stream: StreamId) -> list[Recorded]:
    """What the stream's writers wrote, without what archiving added; its chain is checked on the way."""
    found = [recorded async for recorded in read_events(store, stream)]
    return [recorded for recorded in found if not _is_archivers(recorded)]


def _is_archivers(recorded: Recorded) -> bool:
    event = recorded.event
    return isinstance(event, StreamArchived) or (isinstance(event, EpochStarted) and event.writer.startswith(ARCHIVERS))


async def whole(store: JournalStore, names: Sequence[str]) -> dict[StreamId, list[Recorded]]:
    """The histories of these trajectories and their sandboxes."""
    streams = [StreamId(kind, name) for name in names for kind in (StreamKind.TRAJECTORY, StreamKind.SANDBOX)]
    return {stream: await history(store, stream) for stream in streams}
