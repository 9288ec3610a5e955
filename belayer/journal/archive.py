"""The archive: finished streams in compressed segments, written once, read by range.

A stream's history across server and archive is one chain. What leaves the server is replaced by a mark (StreamArchived)
that names the segment; the part in that segment may begin with an older mark, which names the one before. Readers
follow these marks, so a segment that no mark names (its archiver died in between) is never read twice. Without a
server, `streams` goes by the segments' own indexes: of several copies of one history the one that reaches furthest
counts, for what was copied is immutable.

Blocking storage calls run in threads. ArchiveError when the storage fails or something in it is damaged.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from belayer.errors import ArchiveError
from belayer.ids import StreamId, checked_name
from belayer.journal.archive_format import (
    TRAILER_BYTES,
    Index,
    Part,
    SegmentBuilder,
    read_index,
    read_part,
    read_tail,
)
from belayer.journal.archive_storage import SUFFIX, Storage, Stored, open_storage
from belayer.journal.codec import Entry, decode_entry
from belayer.journal.events import StreamArchived
from belayer.journal.writer import mark_of

_FIRST_READ_BYTES = 64 << 10
_MOST_INDEXES = 4096
_MOST_PARTS = 8
_TIME_FORMAT = "%Y%m%dT%H%M%S"


class Located(NamedTuple):
    """A part and the segment that has it."""

    segment: str
    part: Part


class Archive:
    """The segments of one namespace."""

    def __init__(self, storage: Storage, namespace: str) -> None:
        self.storage = storage
        self.namespace: str = checked_name(namespace)
        self._indexes: OrderedDict[str, Index] = OrderedDict()
        self._parts: OrderedDict[tuple[str, int], list[Entry]] = OrderedDict()

    @property
    def shown(self) -> str:
        """For messages: the place without credentials."""
        return self.storage.shown

    # --- writing ----------------------------------------------------------------------------------------------------

    async def write(self, streams: Iterable[tuple[StreamId, Sequence[Entry]]]) -> str:
        """Store the entries in one new segment; its name, once the segment is durable."""
        created_ns = time.time_ns()
        name = f"{datetime.fromtimestamp(created_ns / 1e9, UTC).strftime(_TIME_FORMAT)}-{os.urandom(4).hex()}{SUFFIX}"

        def store() -> None:
            builder = SegmentBuilder(self.namespace, created_ns)
            for stream, entries in streams:
                builder.add(stream, entries)
            self.storage.put(name, builder.finish())

        await asyncio.to_thread(store)
        return name

    async def remove(self, segment: str) -> None:
        """Remove a segment. What marks still name it can then no longer be read."""
        await asyncio.to_thread(self.storage.remove, segment)
        self._indexes.pop(segment, None)

    # --- reading ----------------------------------------------------------------------------------------------------

    async def read(self, stream: StreamId, mark: StreamArchived, after_sequence: int, limit: int) -> list[Entry]:
        """Up to `limit` entries that end after `after_sequence`, oldest first; fewer at a part's end."""
        at: StreamArchived | None = mark
        while at is not None:
            parts = (await self.index(at.segment)).of(stream)
            if not parts or parts[-1].last_sequence != at.through_sequence:
                raise ArchiveError(self._where(at.segment), f"does not hold {stream} up to {at.through_sequence}")
            if parts[0].first_sequence <= after_sequence + 1:
                part = next(part for part in parts if part.last_sequence > after_sequence)
                entries = await self.part(at.segment, part)
                return [entry for entry in entries if entry.last_sequence > after_sequence][:limit]
            first = (await self.part(at.segment, parts[0]))[0]
            at = mark_of(decode_entry(stream, first.epoch, first.last_sequence, first.body))
        raise ArchiveError(self.shown, f"holds {stream} only from a later event than {after_sequence + 1}")

    async def index(self, segment: str) -> Index:
        """What the segment holds."""
        if (known := self._indexes.get(segment)) is None:
            known = self._indexes[segment] = await asyncio.to_thread(self._read_index, segment)
            if len(self._indexes) > _MOST_INDEXES:
                self._indexes.popitem(last=False)
        return known

    async def part(self, segment: str, part: Part) -> list[Entry]:
        """The entries of one part."""
        key = (segment, part.offset)
        if (entries := self._parts.get(key)) is None:
            entries = self._parts[key] = await asyncio.to_thread(self._read_part, segment, part)
            if len(self._parts) > _MOST_PARTS:
                self._parts.popitem(last=False)
        return entries

    async def segments(self) -> list[Stored]:
        """All segments, oldest first."""
        return await asyncio.to_thread(self.storage.segments)

    # --- without a server -------------------------------------------------------------------------------------------

    async def streams(self) -> dict[StreamId, list[Located]]:
        """The parts of every stream that the archive has from its beginning, in order, as the indexes say."""
        found: dict[StreamId, list[Located]] = {}
        for stored in await self.segments():
            for part in (await self.index(stored.name)).parts:
                found.setdefault(StreamId.parse(part.stream), []).append(Located(stored.name, part))
        return {stream: list(_history(found[stream])) for stream in sorted(found)}

    # --- blocking ---------------------------------------------------------------------------------------------------

    def _read_index(self, segment: str) -> Index:
        where = self._where(segment)
        end = self.storage.read(segment, -_FIRST_READ_BYTES, None)
        tail = read_tail(where, end)
        needed = tail.length + TRAILER_BYTES
        if needed > len(end):
            end = self.storage.read(segment, -needed, None)
            if needed > len(end):
                raise ArchiveError(where, f"is shorter than its index of {tail.length} bytes")
        index = read_index(where, tail, end[-needed:-TRAILER_BYTES])
        if index.namespace != self.namespace:
            raise ArchiveError(where, f"belongs to namespace {index.namespace!r}, not {self.namespace!r}")
        return index

    def _read_part(self, segment: str, part: Part) -> list[Entry]:
        frame = self.storage.read(segment, part.offset, part.offset + part.length)
        return read_part(self._where(segment), part, frame)

    def _where(self, segment: str) -> str:
        return f"{self.shown}/{segment}"


def open_archive(url: str, namespace: str = "default") -> Archive:
    """The archive of a namespace at a folder or fsspec URL. Nothing is read or created yet."""
    return Archive(open_storage(url, checked_name(namespace)), namespace)


def created_at(segment: str) -> datetime | None:
    """When a segment was written, by its name."""
    try:
        return datetime.strptime(segment.partition("-")[0], _TIME_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        return None


def _history(parts: list[Located]) -> Iterator[Located]:
    """Of all copies of a stream's parts those that make up one history: back from the one that reaches furthest.

    An earlier part belongs to it when it ends with the event that the later one was written after.
    """
    chosen: list[Located] = []
    by_end = {(located.part.last_sequence, located.part.last_digest): located for located in parts}
    at = max(parts, key=lambda located: (located.part.last_epoch, located.part.last_sequence))
    while True:
        chosen.append(at)
        before = by_end.get((at.part.first_sequence - 1, at.part.previous_digest))
        if before is None:
            break
        at = before
    return reversed(chosen)
