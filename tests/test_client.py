"""The client for rollout code: what it writes, what it refuses, and how it goes on after being fenced off."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer import ids
from belayer.client import Trajectory, wait_resumed
from belayer.errors import FencedError, InputError, JournalUnavailableError, ProtocolError
from belayer.ids import StreamId
from belayer.journal.codec import Entry
from belayer.journal.events import RecoveryStarted, Rewound, TokensAppended, TrajectoryResumed
from belayer.journal.memory_store import MemoryStore
from belayer.journal.writer import Reader, events_of, take_over
from belayer.projections.trajectory import Boundary, fold
from tests.waiting import DEADLINE_S

T = ids.trajectory("t")
Got = TypeVar("Got")


async def begun(store: MemoryStore, chunk_s: float = 1000.0, **options: float) -> Trajectory:
    """Chunks end by their size alone, unless a test says otherwise."""
    trajectory = await Trajectory.open(store, "t", chunk_s=chunk_s, **options)  # type: ignore[arg-type]
    await trajectory.start("run", "task", [1, 2])
    return trajectory


async def chunks(store: MemoryStore) -> list[TokensAppended]:
    history = await Reader(store, T).catch_up()
    return [event for event in events_of(history) if isinstance(event, TokensAppended)]


async def test_what_is_written_reads_back_as_the_same_state() -> None:
    store = MemoryStore()
    trajectory = await begun(store, chunk_tokens=2)
    await trajectory.begin_generation("w", "w-1")
    await trajectory.append_tokens([10, 11, 12], [-0.5, -1.0, -1.5], weight_version=3)
    await trajectory.finish_generation("stop")
    assert await trajectory.start_action("ls", 60.0, "box") == 1
    assert await trajectory.commit_action(0, [20], b"digest", 0.2) == Boundary(1, trajectory.state.sequence)
    await trajectory.finish("done", reward=0.5)
    assert [chunk.count for chunk in await chunks(store)] == [2, 1]
    assert trajectory.state == fold(await Reader(store, T).catch_up())
    assert trajectory.state.context() == [1, 2, 10, 11, 12, 20]


async def test_a_short_chunk_goes_out_when_its_time_is_up() -> None:
    store = MemoryStore()
    trajectory = await begun(store, chunk_tokens=1000, chunk_s=0.01)
    await trajectory.begin_generation()
    before = trajectory.state.sequence
    await trajectory.append_tokens([10], [-0.5])
    assert await store.wait(T, before, DEADLINE_S)
    assert [chunk.count for chunk in await chunks(store)] == [1]


async def test_a_chunk_never_mixes_weight_versions() -> None:
    store = MemoryStore()
    trajectory = await begun(store, chunk_tokens=100)
    await trajectory.begin_generation()
    await trajectory.append_tokens([10, 11], [0.0, 0.0], weight_version=1)
    await trajectory.append_tokens([12], [0.0], weight_version=2)
    await trajectory.close()
    assert [(chunk.count, chunk.weight_version) for chunk in await chunks(store)] == [(2, 1), (1, 2)]


@pytest.mark.parametrize(
    ("ids_", "logprobs", "mask"), [([1, 2], [0.0], None), ([1], [0.0], [1, 1]), ([1], [0.0, 0.0], [1])]
)
async def test_columns_of_different_length_are_refused_and_nothing_is_written(
    ids_: list[int], logprobs: list[float], mask: list[int] | None
) -> None:
    store = MemoryStore()
    trajectory = await begun(store)
    await trajectory.begin_generation()
    with pytest.raises(InputError, match="equally many"):
        await trajectory.append_tokens(ids_, logprobs, loss_mask=mask)
    await trajectory.close()
    assert await chunks(store) == []


@pytest.mark.parametrize(
    ("calls_before", "call", "said"),
    [
        (0, lambda t: t.start(7, "task", [1]), "run is not usable: Expected str, got int"),
        (0, lambda t: t.start("run", "task", [1], {"a": 1}), "labels is not usable"),
        (0, lambda t: t.start("run", "task", [1], {"a": object()}), "a value is not usable"),
        (3, lambda t: t.append_tokens([1], [-0.5], "v7"), "weight version must be an int, not 'v7'"),
        (3, lambda t: t.append_tokens([1], [-0.5], True), "weight version must be an int, not True"),
        (3, lambda t: t.start_action("ls", None, "box"), "timeout_s is not usable"),
        (4, lambda t: t.commit_action(None, [1], b"", 0.1), "exit_status is not usable: Expected int, got None"),
        (3, lambda t: t.finish("done", "1.0"), "reward is not usable"),
        (3, lambda t: t.finish("done", float("nan")), "the reward must be finite, not nan"),
    ],
)
async def test_a_value_of_a_wrong_type_is_refused_and_the_stream_stays_readable(
    calls_before: int, call: Callable[[Any], Awaitable[None]], said: str
) -> None:
    """What was stored with such a value could never be read again: no recovery, no audit."""
    store = MemoryStore()
    trajectory = await Trajectory.open(store, "t")
    right: list[Callable[[], Awaitable[object]]] = [
        lambda: trajectory.start("run", "task", [1, 2]),
        lambda: trajectory.begin_generation(),
        lambda: trajectory.finish_generation("stop"),
        lambda: trajectory.start_action("ls", 60.0, "box"),
    ]
    for step in right[:calls_before]:
        await step()
    before = trajectory.state
    with pytest.raises(InputError, match=said):
        await call(trajectory)
    assert trajectory.state == before
    assert (await Trajectory.open(store, "t")).state.segments == before.segments


async def test_a_call_that_does_not_fit_is_refused_and_the_trajectory_goes_on() -> None:
    store = MemoryStore()
    trajectory = await begun(store)
    with pytest.raises(ProtocolError, match="no generation has begun"):
        await trajectory.append_tokens([1], [0.0])
    with pytest.raises(ProtocolError, match="before any generation"):
        await trajectory.start_action("ls", 1.0, "box")
    with pytest.raises(ProtocolError, match="that is open cannot start"):
        await trajectory.start("run", "task", [])
    await trajectory.begin_generation()
    assert trajectory.state.generation is not None


async def test_a_resumed_generation_goes_on_after_the_last_journaled_token() -> None:
    store = MemoryStore()
    first = await begun(store, chunk_tokens=1)
    await first.begin_generation("w", "w-1")
    await first.append_tokens([10, 11], [0.0, 0.0])
    await first.flush()
    await first.append_tokens([98], [0.0])
    second = await Trajectory.open(store, "t", chunk_tokens=1)
    with pytest.raises(FencedError):
        await first.append_tokens([99], [0.0])
    assert await second.begin_generation("w", "w-2") == 2
    await second.append_tokens([12], [0.0])
    await second.finish_generation("stop")
    assert second.state.context() == [1, 2, 10, 11, 12]


async def test_an_action_in_flight_keeps_its_number_and_must_be_the_same_command() -> None:
    store = MemoryStore()
    first = await begun(store)
    await first.begin_generation()
    await first.append_tokens([10], [0.0])
    await first.finish_generation("stop")
    assert await first.start_action("ls", 1.0, "box") == 1
    second = await Trajectory.open(store, "t")
    assert await second.start_action("ls", 1.0, "box") == 1
    with pytest.raises(ProtocolError, match="in flight with another command"):
        await second.start_action("rm", 1.0, "box")
    with pytest.raises(ProtocolError, match="in flight in box, not in box-2"):
        await second.start_action("ls", 1.0, "box-2")


async def test_an_action_in_flight_is_not_taken_to_the_container_of_a_later_recovery() -> None:
    store = MemoryStore()
    first = await begun(store)
    await first.begin_generation()
    await first.append_tokens([10], [0.0])
    await first.finish_generation("stop")
    await first.start_action("ls", 1.0, "box")
    late = await Trajectory.open(store, "t")
    recovery, _ = await take_over(store, T, "recovery")
    await recovery.append(RecoveryStarted("box", "restore", "recovery"))
    with pytest.raises(FencedError):
        await late.start_action("ls", 1.0, "box-2")


async def test_opening_waits_for_a_recovery_to_end() -> None:
    store = MemoryStore()
    await begun(store)
    recovery, _ = await take_over(store, T, "recovery")
    await recovery.append(RecoveryStarted("box", "restore", "recovery"))
    with pytest.raises(TimeoutError, match="still under recovery"):
        await wait_resumed(store, "t", timeout_s=0.0)
    opening = asyncio.create_task(Trajectory.open(store, "t"))
    await recovery.append(Rewound(0, 0, "test"), TrajectoryResumed(0, 0, "box-2"))
    trajectory = await opening
    assert trajectory.state.sandbox_incarnation == "box-2"
    assert trajectory.state.epoch == 3


class LosesReplies(MemoryStore):
    """Stores an append and then says that it does not know."""

    to_lose = 0

    async def append(self, stream: StreamId, entry: Entry, notice_tag: str | None = None) -> None:
        await super().append(stream, entry, notice_tag)
        if self.to_lose > 0:
            self.to_lose -= 1
            raise JournalUnavailableError("here", 0.0, "the reply was lost")


async def test_a_generation_ends_in_one_append_with_its_last_tokens_also_when_the_reply_is_lost() -> None:
    store = LosesReplies()
    trajectory = await begun(store, chunk_tokens=4)
    await trajectory.begin_generation()
    await trajectory.append_tokens([1, 2, 3, 4], [0.0] * 4)
    await trajectory.append_tokens([5, 6], [0.0] * 2)
    before = len(await store.read(T))
    store.to_lose = 1
    with pytest.raises(JournalUnavailableError):
        await trajectory.finish_generation("stop")
    await trajectory.finish_generation("stop")
    await trajectory.finish("done")
    assert [entry.count for entry in (await store.read(T))[before:]] == [2, 1]
    assert [chunk.count for chunk in await chunks(store)] == [4, 2]


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=12))
def test_a_lost_reply_neither_loses_nor_doubles_a_token(parts: list[tuple[int, bool]]) -> None:
    async def run() -> None:
        store = LosesReplies()
        trajectory = await begun(store, chunk_tokens=3)
        await trajectory.begin_generation()
        sent: list[int] = []
        for count, lose in parts:
            tokens = list(range(len(sent), len(sent) + count))
            store.to_lose = int(lose)
            sent += tokens
            try:
                await trajectory.append_tokens(tokens, [0.0] * count)
            except JournalUnavailableError:
                assert lose
                await trajectory.append_tokens(tokens, [0.0] * count)
        store.to_lose = 0
        await trajectory.finish_generation("stop")
        assert fold(await Reader(store, T).catch_up()).context() == [1, 2, *sent]
        assert trajectory.state.context() == [1, 2, *sent]

    asyncio.run(run())


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 6))
def test_the_last_tokens_and_the_end_are_one_append_whatever_the_chunks(parts: list[int], chunk_tokens: int) -> None:
    """So a generation that is resumed has never had its stop token."""

    async def run() -> None:
        store = MemoryStore()
        trajectory = await begun(store, chunk_tokens=chunk_tokens)
        await trajectory.begin_generation()
        for count in parts:
            await trajectory.append_tokens(list(range(count)), [0.0] * count)
        await trajectory.finish_generation("stop")
        assert (await store.read(T))[-1].count == 2
        assert isinstance(events_of(await Reader(store, T).catch_up())[-2], TokensAppended)
        assert max(chunk.count for chunk in await chunks(store)) <= chunk_tokens

    asyncio.run(run())


class Away(LosesReplies):
    """Says that it does not know, and has not stored it either when `stores` is False."""

    stores = True

    async def append(self, stream: StreamId, entry: Entry, notice_tag: str | None = None) -> None:
        if self.to_lose > 0 and not self.stores:
            self.to_lose -= 1
            raise JournalUnavailableError("here", 0.0, "nobody is there")
        await super().append(stream, entry, notice_tag)


@pytest.mark.parametrize("stores", [True, False])
async def test_every_call_may_be_made_again_when_the_journal_did_not_answer(stores: bool) -> None:
    store = Away()
    store.stores = stores
    trajectory = await Trajectory.open(store, "t")

    async def twice(call: Callable[[], Awaitable[Got]]) -> Got:
        store.to_lose = 1
        with pytest.raises(JournalUnavailableError):
            await call()
        return await call()

    await twice(lambda: trajectory.start("run", "task", [1, 2]))
    assert await twice(lambda: trajectory.begin_generation("w", "w-1")) == 0
    await trajectory.append_tokens([3], [0.0])
    await trajectory.flush()
    assert await twice(lambda: trajectory.begin_generation("w", "w-2")) == 1
    await twice(lambda: trajectory.finish_generation("stop"))
    assert await twice(lambda: trajectory.start_action("ls", 1.0, "box")) == 1
    assert (await twice(lambda: trajectory.commit_action(0, [4], b"", 0.1))).number == 1
    await twice(lambda: trajectory.finish("done"))
    state = fold(await Reader(store, T).catch_up())
    assert (state.phase, state.context(), state.boundary.number) == ("finished", [1, 2, 3, 4], 1)
    given_up = await Trajectory.open(store, "u")
    await given_up.start("run", "task", [1])
    await twice(lambda: given_up.abort("enough"))
    assert given_up.state.phase == "aborted"
