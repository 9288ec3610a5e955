"""What every JournalStore promises, checked alike on the reference in memory, real Redis, a cluster and Sentinel."""

from __future__ import annotations

import asyncio
import time

import pytest

from belayer import __version__, ids
from belayer.errors import ArchivedError, FencedError, WrongSequenceError
from belayer.ids import StreamKind
from belayer.journal.codec import GENESIS, Entry, encode_entry
from belayer.journal.connect import open_store
from belayer.journal.events import (
    ActionStarted,
    EpochStarted,
    FailureDetected,
    GenerationStarted,
    StreamArchived,
    TrajectoryFinished,
    TrajectoryStarted,
)
from belayer.journal.memory_store import MemoryStore
from belayer.journal.store import JournalStore, Notice
from belayer.journal.writer import Reader, StreamWriter, read_events, take_over
from tests.journal.acl import ACTORS, url_of

T = ids.trajectory("t")


@pytest.fixture(params=["memory", "redis", "redis-3-shards", "redis-least-permissions", "cluster", "sentinel"])
async def store(request: pytest.FixtureRequest, namespace: str):
    match request.param:
        case "memory":
            yield MemoryStore()
            return
        case "cluster":
            url, options = request.getfixturevalue("shared_cluster").url, {}
        case "sentinel":
            url, options = request.getfixturevalue("shared_sentinels").url, {"durability": "replicated"}
        case "redis-least-permissions":
            url, options = url_of(request.getfixturevalue("server_with_users"), ACTORS), {}
        case "redis-3-shards":
            url, options = request.getfixturevalue("redis_url"), {"shards": 3}
        case _:
            url, options = request.getfixturevalue("redis_url"), {}
    store = await open_store(url, namespace=namespace, timeout_s=10.0, **options)
    yield store
    await store.close()


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
    waiting = asyncio.create_task(store.wait(T, 1, 20.0))
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


async def started(store: JournalStore, name: str) -> None:
    writer, _ = await take_over(store, ids.trajectory(name), "a")
    await writer.append(TrajectoryStarted("run", "task", b""))


async def test_notices_come_to_every_group_also_from_before_it(store: JournalStore) -> None:
    await started(store, "a")
    for group in ("g", "h"):
        async with store.subscribe(group, "c") as notices:
            notice = await notices.next(5.0)
            assert notice is not None
            assert (notice.stream, notice.tag) == (ids.trajectory("a"), "trajectory-started")
            await notices.done(notice)
            assert await notices.next(0.01) is None


async def test_events_that_nobody_acts_on_have_no_notice(store: JournalStore) -> None:
    writer, _ = await take_over(store, T, "a")
    await writer.append(ActionStarted(1, "true", 1.0, "i"))
    await writer.append(ActionStarted(1, "true", 1.0, "i"), FailureDetected("i", "died", "gone", "me"))
    async with store.subscribe("g", "c") as notices:
        notice = await notices.next(5.0)
        assert notice is not None and notice.tag == "failure-detected"
        assert await notices.next(0.01) is None


async def test_each_notice_goes_to_one_consumer_of_a_group(store: JournalStore) -> None:
    for number in range(20):
        await started(store, f"t{number}")
    async with store.subscribe("g", "c1") as first, store.subscribe("g", "c2") as second:
        seen: list[Notice] = []
        for number in range(20):
            notice = await (first if number % 2 else second).next(5.0)
            assert notice is not None
            seen.append(notice)
        assert await first.next(0.01) is None
    assert {notice.stream.name for notice in seen} == {f"t{number}" for number in range(20)}


async def test_a_stale_notice_goes_to_another_consumer_before_a_new_one(store: JournalStore) -> None:
    await started(store, "a")
    async with store.subscribe("g", "c1", 0.05) as dead, store.subscribe("g", "c2", 0.05) as alive:
        assert await dead.next(5.0) is not None
        notice = await alive.next(5.0)
        assert notice is not None and notice.stream == ids.trajectory("a")
        await alive.done(notice)
        assert await alive.next(0.15) is None


async def test_a_renewed_notice_is_not_stale(store: JournalStore) -> None:
    await started(store, "a")
    async with store.subscribe("g", "c1", 0.4) as busy, store.subscribe("g", "c2", 0.4) as other:
        notice = await busy.next(5.0)
        assert notice is not None
        for _ in range(6):
            assert await other.next(0.1) is None
            await busy.renew(notice)
        await busy.done(notice)
        await busy.renew(notice)
        assert await other.next(0.5) is None


async def test_what_a_dead_consumer_had_comes_to_its_heir_at_once(store: JournalStore) -> None:
    async with (
        store.subscribe("g", "dead", 1000.0) as dead,
        store.subscribe("g", "other", 1000.0) as other,
        store.subscribe("g", "heir", 1000.0) as heir,
    ):
        await started(store, "kept")
        assert await other.next(5.0) is not None
        for name in "abc":
            await started(store, name)
        left = {await dead.next(5.0) for _ in "abc"}
        assert await heir.holders() == ["dead", "other"]
        waiting = asyncio.create_task(heir.next(20.0))
        await asyncio.wait([waiting], timeout=0.05)
        await heir.inherit("dead")
        inherited = {await waiting, await heir.next(5.0), await heir.next(5.0)}
        assert inherited == left
        await other.inherit("dead")
        assert await heir.holders() == ["heir", "other"]
        for notice in inherited:
            assert notice is not None
            await heir.done(notice)
        assert await heir.holders() == ["other"]
        assert await other.next(0.01) is None


async def test_next_ends_with_the_notice(store: JournalStore) -> None:
    async with store.subscribe("g", "c") as notices:
        waiting = asyncio.create_task(notices.next(20.0))
        await started(store, "a")
        assert await waiting is not None
