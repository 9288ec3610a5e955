"""What is too large is refused before it is sent, with limit and size; the writer goes on; a full stream can end."""

from __future__ import annotations

import pytest

from belayer import ids
from belayer.client import Trajectory
from belayer.errors import InputError, LimitError
from belayer.journal.events import GenerationStarted, Rewound, TrajectoryAborted, TrajectoryResumed
from belayer.journal.limits import LIMITS, Limits
from belayer.journal.memory_store import MemoryStore
from belayer.journal.redis_store import RedisStore
from belayer.journal.writer import Reader, take_over

T = ids.trajectory("t")
SMALL = Limits(event_bytes=4000, group_events=10, group_bytes=6000, stream_bytes=20_000)


def event(size_bytes: int = 0) -> GenerationStarted:
    return GenerationStarted(1, "w" * size_bytes, "i")


async def test_each_limit_names_itself_and_nothing_is_stored(redis_store: RedisStore) -> None:
    writer, _ = await take_over(redis_store, T, "a", limits=SMALL)
    for events, said in (
        ([event(5000)], r"at most 4,000 bytes of a generation-started, got 5,0\d\d; shorten it"),
        ([event(), event(5000), event()], "at most 4,000 bytes of a generation-started"),
        ([event(3000)] * 3, r"at most 6,000 bytes of one append, got 9,\d\d\d; append fewer"),
        ([event()] * 11, "at most 10 events in one append, got 11"),
    ):
        with pytest.raises(LimitError, match=said) as caught:
            await writer.append(*events)
        assert caught.value.got > caught.value.limit and caught.value.stream == "trajectory/t"
        assert writer.sequence == 1
    assert await writer.append(event()) == 2
    assert await writer.append(*[event(500)] * 10) == 12
    assert len(await redis_store.read(T)) == 3


async def test_an_append_may_be_limited_more_than_an_event() -> None:
    writer, _ = await take_over(MemoryStore(), T, "a", limits=Limits(event_bytes=10_000, group_bytes=1000))
    with pytest.raises(LimitError, match="1,000 bytes of one append"):
        await writer.append(event(600), event(600))
    assert await writer.append(event(600)) == 2


async def test_a_stream_that_is_full_takes_only_its_end_whoever_writes() -> None:
    store = MemoryStore()
    writer, _ = await take_over(store, T, "a", limits=SMALL)
    for _ in range(6):
        await writer.append(event(3000))
    with pytest.raises(LimitError, match="at most 20,000 bytes of the stream"):
        await writer.append(event(3000))
    fresh, _ = await take_over(store, T, "b", limits=SMALL)
    with pytest.raises(LimitError, match="bytes of the stream, got 21,"):
        await fresh.append(event(3000))
    generous, _ = await take_over(store, T, "c")
    assert await generous.append(event(3000)) == 10
    last, _ = await take_over(store, T, "d", limits=SMALL)
    assert await last.append(Rewound(0, 0, "a recovery"), TrajectoryResumed(0, 0, "i-2")) == 13
    assert await last.append(TrajectoryAborted("it is full")) == 14


async def test_a_trajectory_can_go_on_after_a_refused_observation() -> None:
    store = MemoryStore()
    trajectory = await Trajectory.open(store, "t", limits=Limits(event_bytes=10_000), chunk_tokens=64)
    await trajectory.start("run", "task", [1])
    await trajectory.begin_generation()
    await trajectory.append_tokens([1], [-0.5])
    await trajectory.finish_generation("tool")
    await trajectory.start_action("cat /dev/zero", 1.0, "")
    with pytest.raises(LimitError, match="action-committed"):
        await trajectory.commit_action(0, range(5000), bytes(16), 0.1)
    boundary = await trajectory.commit_action(0, range(500), bytes(16), 0.1, dropped_bytes=18_000)
    assert boundary.number == 1
    await trajectory.finish("done")
    again = await Trajectory.open(store, "t")
    assert again.state.phase == "finished" and len(again.state.context()) == 502


async def test_after_refused_tokens_a_trajectory_can_only_be_aborted() -> None:
    """Otherwise the sample would lack them."""
    store = MemoryStore()
    trajectory = await Trajectory.open(store, "t", limits=Limits(stream_bytes=4000), chunk_tokens=100, chunk_s=60.0)
    await trajectory.start("run", "task", [1])
    await trajectory.begin_generation()
    with pytest.raises(LimitError):
        for _ in range(10):
            await trajectory.append_tokens([1] * 100, [-0.5] * 100)
    with pytest.raises(LimitError):
        await trajectory.finish_generation("stop")
    with pytest.raises(LimitError):
        await trajectory.flush()
    await trajectory.abort("too long")
    await trajectory.close()
    state = (await Trajectory.open(store, "t")).state
    assert state.phase == "aborted"
    reader = Reader(store, T)
    await reader.catch_up()
    assert reader.size_bytes < 5000


async def test_chunks_that_cannot_fit_are_refused_at_once() -> None:
    with pytest.raises(InputError, match="chunks of 1000000 tokens do not fit"):
        await Trajectory.open(MemoryStore(), "t", chunk_tokens=1_000_000)


def test_the_defaults_are_those_of_the_page() -> None:
    assert Limits(8 << 20, 1000, 16 << 20, 1 << 30) == LIMITS
