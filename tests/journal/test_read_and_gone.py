"""A failover takes back what somebody has read already: whoever takes the stream over reads it again."""

from __future__ import annotations

import pytest

from belayer.client import Trajectory
from belayer.errors import WrongSequenceError
from belayer.ids import StreamId
from belayer.journal import writer as writing
from belayer.journal.codec import Entry
from belayer.journal.memory_store import MemoryStore
from belayer.journal.writer import Reader, take_over
from tests.journal.faults import T, generation, stored, written


class FailingOver(MemoryStore):
    """A server that has lost its last entry at the first `times` takeovers; its writer then sends it again."""

    times = 0

    async def take_over(self, stream: StreamId, after: Entry | None, entry: Entry) -> Entry | None:
        if not self.times:
            return await super().take_over(stream, after, entry)
        self.times -= 1
        sent_again = self._streams[stream].pop()
        try:
            return await super().take_over(stream, after, entry)
        finally:
            self._streams[stream].append(sent_again)


async def test_a_takeover_is_built_anew_on_what_came_back() -> None:
    store = FailingOver()
    await written(store)
    store.times = 2
    writer, history = await take_over(store, T, "b")
    assert [(recorded.epoch, recorded.sequence) for recorded in history] == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 5)]
    assert await writer.append(generation(9)) == 6
    assert len(await stored(store)) == 6


async def test_it_gives_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "READ_AGAIN_S", 0.0)
    store = FailingOver()
    await written(store)
    store.times = 100
    with pytest.raises(WrongSequenceError):
        await take_over(store, T, "b")
    assert store.times >= 98


async def test_a_reader_of_the_callers_is_not_read_again() -> None:
    store = FailingOver()
    await written(store)
    store.times = 1
    with pytest.raises(WrongSequenceError) as caught:
        await take_over(store, T, "b", reader=Reader(store, T))
    assert (caught.value.expected, caught.value.actual) == (4, 3)


async def test_a_trajectory_opens_on_what_came_back() -> None:
    store = FailingOver()
    async with await Trajectory.open(store, T.name) as first:
        await first.start("r", "task", [1, 2, 3])
    store.times = 1
    async with await Trajectory.open(store, T.name) as again:
        assert (again.state.phase, again.state.epoch) == ("open", 2)
