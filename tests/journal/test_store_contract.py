"""What every JournalStore promises, checked alike on the reference in memory, real Redis, a cluster and Sentinel."""

from __future__ import annotations

import asyncio
import time

import pytest

from belayer import __version__, ids
from belayer.errors import ArchivedError, FencedError, WrongSequenceError
from belayer.ids import StreamKind
from belayer.journal.codec import GENESIS, Entry, encode_entry
from belayer.journal.events import (
    EpochStarted,
    GenerationStarted,
    StreamArchived,
    TrajectoryFinished,
)
from belayer.journal.store import JournalStore
from belayer.journal.writer import Reader, StreamWriter, read_events, take_over
from tests.waiting import DEADLINE_S

T = ids.trajectory("t")


def entry(epoch: int, after: int, events: int = 1, digest: bytes = GENESIS) -> tuple[Entry, bytes]:
    started = [GenerationStarted(number, "w", "w-1") for number in range(events)]
    return encode_entry(epoch, after, digest, started, [ids.new_event_id() for _ in started], time.time_ns())


async def appended(store: JournalStore, writer: StreamWriter, count: int) -> list[int]:
    return [await writer.append(GenerationStarted(number + 1, "w", "w-1")) for number in range(count)]


# --- appending -------------------------------------------------------------------------------------------------------


async def test_what_was_appended_is_read_back_in_order(store: JournalStore) -> None:
    writer, history = await take_over(store, T, "a")
    assert [recorded.event for recorded in history] == [EpochStarted(1, "a", __version__)]
    assert await appended(store, writer, 3) == [2, 3, 4]
    events = [recorded async for recorded in read_events(store, T)]
    assert [recorded.sequence for recorded in events] == [1, 2, 3, 4]
    assert [recorded.epoch for recorded in events] == [1, 1, 1, 1]
    assert (await store.last(T)).last_sequence == 4  # type: ignore[union-attr]


async def test_a_group_is_one_entry_with_a_sequence_for_each_event(store: JournalStore) -> None:
    writer, _ = await take_over(store, T, "a")
    assert await writer.append(*[GenerationStarted(n, "w", "i") for n in range(20)]) == 21
    entries = await store.read(T, 1)
    assert [(stored.last_sequence, stored.count, stored.expected_sequence) for stored in entries] == [(21, 20, 1)]


async def test_a_repeated_append_succeeds_and_stores_once(store: JournalStore) -> None:
    _, history = await take_over(store, T, "a")
    first, digest = entry(1, 1, digest=history[-1].digest)
    await store.append(T, first, "generation-started")
    await store.append(T, first, "generation-started")
    second, _ = entry(1, 2, digest=digest)
    await store.append(T, second)
    await store.append(T, first)
    assert await store.read(T, 1) == [first, second]


async def test_a_repeated_append_succeeds_after_a_takeover_that_saw_it(store: JournalStore) -> None:
    _, history = await take_over(store, T, "a")
    stored, _ = entry(1, 1, digest=history[-1].digest)
    await store.append(T, stored)
    await take_over(store, T, "b")
    await store.append(T, stored)
    assert len(await store.read(T)) == 3


async def test_a_stale_writer_is_refused_for_ever(store: JournalStore) -> None:
    stale, _ = await take_over(store, T, "a")
    await appended(store, stale, 2)
    fresh, _ = await take_over(store, T, "b")
    for _ in range(2):
        with pytest.raises(FencedError) as caught:
            await StreamWriter(store, T, 1, 3, GENESIS).append(GenerationStarted(9, "w", "i"))
        assert (caught.value.epoch, caught.value.current_epoch) == (1, 2)
    await appended(store, fresh, 1)
    with pytest.raises(FencedError):
        await stale.append(GenerationStarted(9, "w", "i"))
    assert len(await store.read(T)) == 5


@pytest.mark.parametrize("believed", [0, 1, 3, 7])
async def test_a_wrong_expected_sequence_is_refused_with_both_numbers(store: JournalStore, believed: int) -> None:
    writer, _ = await take_over(store, T, "a")
    await appended(store, writer, 1)
    with pytest.raises(WrongSequenceError) as caught:
        await store.append(T, entry(1, believed)[0])
    assert (caught.value.expected, caught.value.actual) == (believed, 2)
    assert len(await store.read(T)) == 2


async def test_a_group_that_reaches_past_the_end_from_within_is_refused(store: JournalStore) -> None:
    writer, _ = await take_over(store, T, "a")
    await appended(store, writer, 3)
    with pytest.raises(WrongSequenceError):
        await store.append(T, entry(1, 2, events=5)[0])
    assert (await store.last(T)).last_sequence == 4  # type: ignore[union-attr]


async def test_the_first_append_of_a_stream_needs_no_takeover(store: JournalStore) -> None:
    first, _ = entry(1, 0)
    await store.append(T, first, "generation-started")
    assert await store.read(T) == [first]
    assert await store.streams() == [T]


async def test_many_writers_at_once_each_keep_their_order(store: JournalStore) -> None:
    async def work(name: str) -> None:
        writer, _ = await take_over(store, ids.trajectory(name), "a")
        await appended(store, writer, 10)

    names = [f"t{number}" for number in range(50)]
    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(work(name))
    for name in names:
        events = [recorded.event async for recorded in read_events(store, ids.trajectory(name))]
        assert events == [EpochStarted(1, "a", __version__), *[GenerationStarted(n + 1, "w", "w-1") for n in range(10)]]


async def test_two_appends_at_one_place_store_one(store: JournalStore) -> None:
    _, history = await take_over(store, T, "a")
    rivals = [entry(1, 1, digest=history[-1].digest)[0] for _ in range(8)]
    outcomes = await asyncio.gather(*(store.append(T, rival) for rival in rivals), return_exceptions=True)
    assert outcomes.count(None) == 1
    assert sum(isinstance(outcome, WrongSequenceError) for outcome in outcomes) == 7
    assert await store.read(T, 1) == [rivals[outcomes.index(None)]]


# --- taking over -----------------------------------------------------------------------------------------------------


async def test_takeovers_at_once_have_different_epochs(store: JournalStore) -> None:
    writers = await asyncio.gather(*(take_over(store, T, f"w{number}") for number in range(8)))
    assert sorted(writer.epoch for writer, _ in writers) == list(range(1, 9))
    reader = Reader(store, T)
    assert [recorded.epoch for recorded in await reader.catch_up()] == list(range(1, 9))


async def test_a_takeover_of_something_else_says_what_is_last_now(store: JournalStore) -> None:
    writer, _ = await take_over(store, T, "a")
    seen = await store.last(T)
    await appended(store, writer, 1)
    late, _ = encode_entry(2, 1, GENESIS, [EpochStarted(2, "b")], [ids.new_event_id()], 0)
    assert await store.take_over(T, seen, late) == await store.last(T)
    assert await store.take_over(T, None, entry(1, 0)[0]) == await store.last(T)


async def test_a_repeated_takeover_succeeds_and_stores_once(store: JournalStore) -> None:
    first, _ = encode_entry(1, 0, GENESIS, [EpochStarted(1, "a")], [ids.new_event_id()], 0)
    assert await store.take_over(T, None, first) is None
    assert await store.take_over(T, None, first) is None
    assert await store.read(T) == [first]


async def test_a_takeover_built_on_a_lost_stream_is_refused(store: JournalStore) -> None:
    gone, digest = entry(1, 0)
    late, _ = encode_entry(2, 1, digest, [EpochStarted(2, "b")], [ids.new_event_id()], 0)
    with pytest.raises(WrongSequenceError) as caught:
        await store.take_over(T, gone, late)
    assert (caught.value.expected, caught.value.actual) == (1, 0)


# --- reading ---------------------------------------------------------------------------------------------------------


async def test_reading_from_anywhere_across_epochs(store: JournalStore) -> None:
    ends: list[int] = []
    for _ in range(5):
        writer, _ = await take_over(store, T, "a")
        ends += [writer.sequence, await writer.append(*[GenerationStarted(1, "w", "i")] * 3)]
        ends += await appended(store, writer, 2)
    for after in range(ends[-1] + 2):
        assert [stored.last_sequence for stored in await store.read(T, after)] == [end for end in ends if end > after]
        assert [stored.last_sequence for stored in await store.read(T, after, 2)] == [e for e in ends if e > after][:2]


async def test_an_unknown_stream_is_empty(store: JournalStore) -> None:
    assert await store.last(T) is None
    assert await store.read(T) == []
    assert await store.read(T, 5) == []
    assert await store.wait(T, 0, 0.01) is False


async def test_waiting_ends_with_the_append(store: JournalStore) -> None:
    waiting = asyncio.create_task(store.wait(T, 1, DEADLINE_S))
    writer, _ = await take_over(store, T, "a")
    assert not waiting.done()
    await appended(store, writer, 1)
    assert await waiting
    assert await store.wait(T, 1, 0.0)


async def test_streams_are_listed_by_kind_and_removed(store: JournalStore) -> None:
    for stream in (ids.worker("w"), ids.trajectory("b"), ids.trajectory("a"), ids.sandbox("a")):
        await take_over(store, stream, "x")
    assert await store.streams() == [ids.sandbox("a"), ids.trajectory("a"), ids.trajectory("b"), ids.worker("w")]
    assert await store.streams(StreamKind.TRAJECTORY) == [ids.trajectory("a"), ids.trajectory("b")]
    await store.remove(ids.trajectory("a"))
    assert await store.streams(StreamKind.TRAJECTORY) == [ids.trajectory("b")]
    assert await store.read(ids.trajectory("a")) == []


async def test_a_removed_stream_does_not_grow_again_from_its_middle(store: JournalStore) -> None:
    writer, _ = await take_over(store, T, "a")
    await store.remove(T)
    with pytest.raises(WrongSequenceError) as caught:
        await writer.append(TrajectoryFinished("done"))
    assert (caught.value.expected, caught.value.actual) == (1, 0)
    assert await store.streams() == []


# --- trimming --------------------------------------------------------------------------------------------------------


async def marked(store: JournalStore, writer: StreamWriter) -> Entry:
    """The archive's mark, as an archiver would have put it."""
    reader = Reader(store, writer.stream)
    await reader.catch_up()
    events = [EpochStarted(reader.epoch + 1, "archiver"), StreamArchived(reader.sequence, "segment")]
    event_ids = [ids.new_event_id(), ids.new_event_id()]
    mark, _ = encode_entry(reader.epoch + 1, reader.sequence, reader.digest, events, event_ids, 0)
    assert await store.take_over(writer.stream, reader.last_entry, mark) is None
    return mark


async def test_a_trimmed_stream_keeps_its_end_and_refuses_old_writers_for_ever(store: JournalStore) -> None:
    writer, _ = await take_over(store, T, "a")
    await appended(store, writer, 5)
    lost, _ = entry(1, 6)
    mark = await marked(store, writer)
    await store.trim(T, mark)
    await store.trim(T, mark)
    assert await store.read(T) == [mark]
    assert await store.last(T) == mark
    assert await store.streams() == [T]
    assert not await store.wait(T, mark.last_sequence, 0.0)
    for stale in (writer, StreamWriter(store, T, 1, 0, GENESIS), StreamWriter(store, T, 1, 8, GENESIS)):
        with pytest.raises(FencedError):
            await stale.append(GenerationStarted(9, "w", "i"))
    with pytest.raises(FencedError):
        await store.append(T, lost)
    assert await store.take_over(T, None, entry(1, 0)[0]) == mark
    assert await store.read(T) == [mark]


async def test_a_trimmed_stream_can_be_taken_over_and_goes_on(store: JournalStore) -> None:
    writer, _ = await take_over(store, T, "a")
    await appended(store, writer, 3)
    mark = await marked(store, writer)
    await store.trim(T, mark)
    reader = Reader(store, T, from_mark=True)
    assert [recorded.sequence for recorded in await reader.catch_up()] == [5, 6]
    later, digest = encode_entry(3, 6, reader.digest, [EpochStarted(3, "b")], [ids.new_event_id()], 0)
    assert await store.take_over(T, mark, later) is None
    assert await StreamWriter(store, T, 3, 7, digest).append(GenerationStarted(4, "w", "i")) == 8
    assert [stored.last_sequence for stored in await store.read(T)] == [6, 7, 8]
    assert [stored.last_sequence for stored in await store.read(T, 6)] == [7, 8]
    await store.trim(T, mark)
    assert [stored.last_sequence for stored in await store.read(T)] == [6, 7, 8]


async def test_only_what_comes_before_an_entry_of_the_stream_is_trimmed(store: JournalStore) -> None:
    writer, _ = await take_over(store, T, "a")
    await appended(store, writer, 3)
    await store.trim(T, entry(1, 1)[0])
    await store.trim(T, entry(1, 9)[0])
    await store.trim(ids.trajectory("unknown"), entry(1, 1)[0])
    assert len(await store.read(T)) == 4
    assert await store.streams() == [T]


async def test_a_reader_without_the_archive_is_told_what_is_missing(store: JournalStore) -> None:
    writer, _ = await take_over(store, T, "a")
    await appended(store, writer, 3)
    await store.trim(T, await marked(store, writer))
    with pytest.raises(ArchivedError, match="events 1 to 4 were archived in segment segment; name the archive"):
        await Reader(store, T).catch_up()
    with pytest.raises(ArchivedError):
        await take_over(store, T, "b")


# --- notices ---------------------------------------------------------------------------------------------------------
