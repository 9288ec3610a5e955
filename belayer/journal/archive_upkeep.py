"""Looking after an archive: is everything in it what was written, and what may go because it is old or too much.

`verify` reads every byte once and checks digests, sequences and the chain of every stream, and that what the server's
marks name is there. `prune` removes oldest segments first; of each it first removes the streams' marks from the server,
then the segment, so whoever dies in between leaves segments that nobody misses, which the next prune finds again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from belayer.errors import ArchiveError, CodecError, JournalError, ProtocolError
from belayer.ids import StreamId
from belayer.journal.archive import Archive, created_at
from belayer.journal.archive_format import Index, Part
from belayer.journal.codec import decode_entry
from belayer.journal.events import EpochStarted, StreamArchived
from belayer.journal.store import JournalStore
from belayer.journal.writer import mark_of

_PAGE = 256


class SegmentRow(msgspec.Struct, frozen=True):
    """One segment for people. Bytes: as stored, and before compression."""

    segment: str
    created: str
    size_bytes: int
    raw_bytes: int
    streams: int
    events: int


class Verified(msgspec.Struct, frozen=True):
    """What `verify` found. `unnamed`: segments that no mark on the server names; they only take up space."""

    segments: int
    streams: int
    events: int
    raw_bytes: int
    size_bytes: int
    problems: list[str]
    unnamed: list[str]


class Pruned(msgspec.Struct, frozen=True):
    """What `prune` removed, or would remove. `kept`: those with a part of a stream that goes on in what stays."""

    removed: list[SegmentRow]
    kept: list[str]
    streams: int
    left_bytes: int


class _Doomed(NamedTuple):
    row: SegmentRow
    holds: Index


async def rows(archive: Archive) -> list[SegmentRow]:
    """All segments, oldest first. ArchiveError at one that cannot be read."""
    return [
        _row(stored.name, stored.size_bytes, await archive.index(stored.name)) for stored in await archive.segments()
    ]


async def verify(archive: Archive, store: JournalStore | None = None) -> Verified:
    """Read and check everything; with the server also that its marks are met."""
    problems: list[str] = []
    readable: dict[str, Index] = {}
    stored = await archive.segments()
    for name, _ in stored:
        try:
            index = readable[name] = await archive.index(name)
        except ArchiveError as error:
            problems.append(str(error))
            continue
        for part in index.parts:
            if problem := await _part_problem(archive, name, part):
                problems.append(problem)
    named: set[str] = set()
    if store is not None:
        for stream in await store.streams():
            try:
                named |= await _check_marks(archive, store, stream, problems)
            except (CodecError, ProtocolError) as error:
                problems.append(str(error))
    parts = [part for index in readable.values() for part in index.parts]
    return Verified(
        segments=len(stored),
        streams=len({part.stream for part in parts}),
        events=sum(part.last_sequence - part.first_sequence + 1 for part in parts),
        raw_bytes=sum(part.raw_bytes for part in parts),
        size_bytes=sum(size_bytes for _, size_bytes in stored),
        problems=problems,
        unnamed=[] if store is None else [name for name, _ in stored if name not in named],
    )


async def prune(
    archive: Archive,
    store: JournalStore,
    now: datetime,
    older_than: timedelta | None = None,
    larger_than_bytes: int | None = None,
    dry_run: bool = False,
) -> Pruned:
    """Remove segments that are older, then the oldest until what is left is no larger; with the marks that name them.

    A stream goes as a whole or not at all, so a segment stays while one of its streams goes on in another one that
    stays, or on the server. A stream that was removed is gone for good: its name must not be used again.
    """
    all_rows = await rows(archive)
    left_bytes = sum(row.size_bytes for row in all_rows)
    doomed: dict[str, _Doomed] = {}
    for row in all_rows:
        written = created_at(row.segment)
        old = older_than is not None and written is not None and now - written > older_than
        if old or (larger_than_bytes is not None and left_bytes > larger_than_bytes):
            doomed[row.segment] = _Doomed(row, await archive.index(row.segment))
            left_bytes -= row.size_bytes
    staying = await _staying(archive, store, [row.segment for row in all_rows], doomed)
    kept = [segment for segment in doomed if segment in staying]
    removed: list[SegmentRow] = []
    streams = 0
    for segment, (row, holds) in doomed.items():
        if segment in staying:
            left_bytes += row.size_bytes
            continue
        streams += len(_streams(holds))
        removed.append(row)
        if not dry_run:
            for stream in _streams(holds):
                if await _mark(store, stream) is not None:
                    await store.remove(stream)
            await archive.remove(segment)
    return Pruned(removed, kept, streams, left_bytes)


async def _staying(
    archive: Archive, store: JournalStore, segments: Sequence[str], doomed: Mapping[str, _Doomed]
) -> set[str]:
    """Those of the doomed segments that have to stay after all, because of a stream of which something stays."""
    places: dict[StreamId, set[str]] = {stream: set() for one in doomed.values() for stream in _streams(one.holds)}
    for segment in segments:
        for stream in _streams(await archive.index(segment)):
            if stream in places:
                places[stream].add(segment)
    going = set(doomed)
    for stream, holders in places.items():
        if (mark := await _mark(store, stream)) is not None:
            holders.add(mark.segment)
            if await _goes_on(store, stream):
                going -= holders
    while stay := {segment for stream in places if not places[stream] <= going for segment in places[stream] & going}:
        going -= stay
    return set(doomed) - going


async def _goes_on(store: JournalStore, stream: StreamId) -> bool:
    """Whether somebody has written in the stream since it was archived."""
    sequence = 0
    while entries := await store.read(stream, sequence, _PAGE):
        for entry in entries:
            for recorded in decode_entry(stream, entry.epoch, entry.last_sequence, entry.body):
                if not isinstance(recorded.event, EpochStarted | StreamArchived):
                    return True
        sequence = entries[-1].last_sequence
    return False


# --- parts ----------------------------------------------------------------------------------------------------------


async def _part_problem(archive: Archive, segment: str, part: Part) -> str:
    """What is wrong with a part, or an empty text."""
    stream = StreamId.parse(part.stream)
    where = f"archive {archive.shown}/{segment}, {stream}"
    sequence, digest = part.first_sequence - 1, part.previous_digest
    try:
        for entry in await archive.part(segment, part):
            for recorded in decode_entry(stream, entry.epoch, entry.last_sequence, entry.body):
                if (recorded.sequence, recorded.previous_digest) != (sequence + 1, digest):
                    return f"{where}: event {recorded.sequence} does not follow event {sequence}"
                sequence, digest = recorded.sequence, recorded.digest
    except JournalError as error:
        return str(error) if isinstance(error, ArchiveError) else f"{where}: {error}"
    return "" if digest == part.last_digest else f"{where}: its end is not what its index says"


async def _check_marks(archive: Archive, store: JournalStore, stream: StreamId, problems: list[str]) -> set[str]:
    """Follow the stream's marks; the segments that they name."""
    named: set[str] = set()
    mark = await _mark(store, stream)
    while mark is not None:
        named.add(mark.segment)
        try:
            parts = (await archive.index(mark.segment)).of(stream)
            if not parts or parts[-1].last_sequence != mark.through_sequence:
                raise ArchiveError(f"{archive.shown}/{mark.segment}", f"lacks {stream} up to {mark.through_sequence}")
            if parts[0].first_sequence == 1:
                break
            first = (await archive.part(mark.segment, parts[0]))[0]
        except ArchiveError as error:
            problems.append(str(error))
            break
        mark = mark_of(decode_entry(stream, first.epoch, first.last_sequence, first.body))
    return named


async def _mark(store: JournalStore, stream: StreamId) -> StreamArchived | None:
    """The mark with which the stream begins on the server, if it does."""
    first = await store.read(stream, 0, 1)
    if not first:
        return None
    mark = mark_of(decode_entry(stream, first[0].epoch, first[0].last_sequence, first[0].body))
    if mark is None and first[0].expected_sequence:
        raise ProtocolError(f"{stream} begins with event {first[0].expected_sequence + 1} and no mark; audit it first")
    return mark


def _streams(index: Index) -> Sequence[StreamId]:
    return [StreamId.parse(name) for name in dict.fromkeys(part.stream for part in index.parts)]


def _row(segment: str, size_bytes: int, index: Index) -> SegmentRow:
    written = created_at(segment)
    return SegmentRow(
        segment=segment,
        created=written.isoformat() if written is not None else "",
        size_bytes=size_bytes,
        raw_bytes=sum(part.raw_bytes for part in index.parts),
        streams=len(_streams(index)),
        events=sum(part.last_sequence - part.first_sequence + 1 for part in index.parts),
    )
