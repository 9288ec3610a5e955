"""Moves finished trajectories from the server into the archive, many in one segment.

For each stream, in this order: its entries are read and their chain checked; the segment that holds them is made
durable; the mark that names it is appended, together with the next epoch and only if nothing came in between; the
entries before the mark are dropped. Whoever dies between two steps leaves either all entries on the server or all of
them in a durable segment that the mark names; the next one to get the notice goes on from there. A stream that does not
hang together stays where it is, for the audit.

A trajectory waits until its sandbox is removed; then both streams go. One archiver handles a notice, wherever it runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

import structlog

from belayer import __version__, ids
from belayer.errors import JournalError, ProtocolError, WrongSequenceError
from belayer.ids import StreamId, StreamKind
from belayer.journal.archive import Archive
from belayer.journal.codec import Entry, encode_entry
from belayer.journal.events import (
    AnyEvent,
    EpochStarted,
    SandboxRemoved,
    StreamArchived,
    TrajectoryAborted,
    TrajectoryFinished,
)
from belayer.journal.store import JournalStore, Notice
from belayer.journal.writer import Reader, mark_of

log = structlog.get_logger("belayer.archiver")

GROUP = "all-hosts"
"""In place of a host's name in the consumer group: each notice goes to one archiver of all."""
SEGMENT_BYTES = 64 << 20
LINGER_S = 5.0
_PAGE = 256


class _Read(NamedTuple):
    """A stream as it is on the server: what is to be archived, and what the mark is to follow."""

    stream: StreamId
    entries: list[Entry]
    reader: Reader
    mark: Entry | None
    """The newest mark on the server; what comes before it is archived already."""


class _Batch:
    """Trajectories that wait to go into one segment, and what becomes of them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.outcomes: asyncio.Task[dict[str, JournalError | None]]


class Archiver:
    """`linger_s`: how long finished trajectories are collected for one segment of at most about `segment_bytes`."""

    name = "archiver"
    tags = frozenset({"trajectory-finished", "trajectory-aborted"})
    concurrency = 10_000
    stale_after_s = 4.0

    def __init__(
        self,
        store: JournalStore,
        archive: Archive,
        by: str,
        *,
        patience_s: float = 20.0,
        linger_s: float = LINGER_S,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._store = store
        self._archive = archive
        self._by = by
        self._patience_s = patience_s
        self._linger_s = linger_s
        self._segment_bytes = segment_bytes
        self._batch: _Batch | None = None
        self._one_at_a_time = asyncio.Lock()

    async def handle(self, notice: Notice) -> None:
        """Returns once the trajectory and its sandbox are archived and trimmed."""
        name = notice.stream.name
        await self._sandbox_removed(name)
        if self._batch is None:
            self._batch = _Batch()
            self._batch.outcomes = asyncio.create_task(self._archive_later(self._batch))
        batch = self._batch
        batch.names.append(name)
        if (error := (await asyncio.shield(batch.outcomes))[name]) is not None:
            raise error

    async def archive(self, names: Sequence[str]) -> dict[str, JournalError | None]:
        """Archive these trajectories now: for each None, or why it was left where it is."""
        outcomes: dict[str, JournalError | None] = {}
        batch: list[_Read] = []
        size_bytes = 0
        for name in names:
            try:
                found = [await self._read(ids.trajectory(name)), await self._read(ids.sandbox(name))]
            except JournalError as error:
                outcomes[name] = error
                continue
            outcomes[name] = None
            batch += [read for read in found if read is not None]
            size_bytes += sum(len(entry.body) for read in found if read is not None for entry in read.entries)
            if size_bytes >= self._segment_bytes:
                outcomes |= await self._move(batch)
                batch, size_bytes = [], 0
        return outcomes | await self._move(batch)

    # --- one stream -------------------------------------------------------------------------------------------------

    async def _read(self, stream: StreamId) -> _Read | None:
        """The stream, unless it is archived already (it is trimmed then, if it was not).

        DamagedJournalError when it is not whole, ProtocolError when it has not ended.
        """
        reader = Reader(self._store, stream, from_mark=True)
        entries: list[Entry] = []
        mark: Entry | None = None
        ended, new = False, False
        while page := await self._store.read(stream, reader.sequence, _PAGE):
            for entry in page:
                recorded = reader.accept(entry)
                if mark_of(recorded) is not None:
                    mark, entries, ended, new = entry, [], True, False
                entries.append(entry)
                events = [each.event for each in recorded]
                new |= any(not isinstance(event, EpochStarted | StreamArchived) for event in events)
                ended |= any(_ends(stream.kind, event) for event in events)
        if mark is not None and not new:
            await self._store.trim(stream, mark)
            return None
        if not ended and entries:
            raise ProtocolError(f"{stream} has not ended; only what has can be archived")
        return _Read(stream, entries, reader, mark) if entries else None

    async def _move(self, batch: Sequence[_Read]) -> dict[str, JournalError | None]:
        """Write one segment, then mark and trim each of its streams; what went wrong, by trajectory."""
        if not batch:
            return {}
        try:
            segment = await self._archive.write([(read.stream, read.entries) for read in batch])
        except JournalError as error:
            return {read.stream.name: error for read in batch}
        outcomes: dict[str, JournalError | None] = {}
        for read, error in zip(batch, await asyncio.gather(*(self._leave(r, segment) for r in batch)), strict=True):
            outcomes[read.stream.name] = outcomes.get(read.stream.name) or error
        log.info("archived", segment=segment, streams=len(batch), failed=sum(map(bool, outcomes.values())))
        return outcomes

    async def _leave(self, read: _Read, segment: str) -> JournalError | None:
        """Mark the stream as archived up to where it was read, then drop what is."""
        reader = read.reader
        epoch = reader.epoch + 1
        started = EpochStarted(epoch, self._by, __version__)
        events: list[AnyEvent] = [started, StreamArchived(reader.sequence, segment)]
        event_ids = [ids.new_event_id() for _ in events]
        mark, _ = encode_entry(epoch, reader.sequence, reader.digest, events, event_ids, time.time_ns())
        try:
            if (now := await self._store.take_over(read.stream, reader.last_entry, mark)) is not None:
                return WrongSequenceError(str(read.stream), reader.sequence, now.last_sequence)
            await self._store.trim(read.stream, mark)
        except JournalError as error:
            return error
        return None

    # --- batches ----------------------------------------------------------------------------------------------------

    async def _sandbox_removed(self, name: str) -> None:
        """TimeoutError when the sandbox is not removed yet; its notice comes again."""
        deadline = time.monotonic() + self._patience_s
        stream = ids.sandbox(name)
        reader = Reader(self._store, stream, from_mark=True)
        removed = True
        while True:
            for entry in await self._store.read(stream, reader.sequence, _PAGE):
                for recorded in reader.accept(entry):
                    if not isinstance(recorded.event, EpochStarted):
                        removed = isinstance(recorded.event, SandboxRemoved | StreamArchived)
            if removed:
                return
            if (left_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"{stream} is not removed yet; its trajectory stays on the server")
            await self._store.wait(stream, reader.sequence, left_s)

    async def _archive_later(self, batch: _Batch) -> dict[str, JournalError | None]:
        """Let the batch grow for a while, then archive it; one batch at a time."""
        await asyncio.sleep(self._linger_s)
        async with self._one_at_a_time:
            if self._batch is batch:
                self._batch = None
            return await self.archive(batch.names)


def _ends(kind: StreamKind, event: AnyEvent) -> bool:
    """Whether nothing that counts comes after this event."""
    if kind is StreamKind.SANDBOX:
        return isinstance(event, SandboxRemoved)
    return isinstance(event, TrajectoryFinished | TrajectoryAborted)
