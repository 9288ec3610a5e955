"""Whatever fails, in whatever order: the caller's stream has each token once. And what fails for good is said."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belayer import ids
from belayer.errors import JournalUnavailableError
from belayer.gpu.recorded_prefix import END, TokenRecording
from belayer.ids import StreamId
from belayer.journal.codec import Entry
from belayer.journal.events import RecoveryStarted, Rewound, TrajectoryFinished, TrajectoryResumed
from belayer.journal.memory_store import MemoryStore
from belayer.journal.writer import Reader, take_over
from belayer.projections.trajectory import fold
from tests.gpu.gateway_site import LOGPROBS, PROMPT, TURN, Site, site
from tests.waiting import DEADLINE_S

WHOLE = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1000}, "return_logprob": True}
Incident = Literal["caller", "gateway", "engine"]
"""The caller leaves and comes back; the gateway ends and another one begins; the engine is killed."""


def test_a_stream_through_any_incidents_has_each_token_once(tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        made = runner.run(stack.enter_async_context(site(tmp_path, tokens_per_s=1500)))
        names = (f"r{number}" for number in itertools.count())

        @settings(max_examples=5, deadline=None)
        @given(st.lists(st.tuples(st.integers(1, 90), st.sampled_from(["caller", "gateway", "engine"])), max_size=3))
        def examples(incidents: list[tuple[int, Incident]]) -> None:
            runner.run(_through(made, next(names), incidents))

        try:
            runner.run(made.worker("w", shadow=True))
            examples()
        finally:
            runner.run(stack.aclose())


async def _through(made: Site, rid: str, incidents: list[tuple[int, Incident]]) -> None:
    """Read the stream; at each incident read so many tokens on first, then let it happen."""
    tokens: list[int] = []
    logprobs: list[float] = []
    left = list(incidents)
    while not tokens or tokens[-1] != TURN[-1]:
        async with made.gateway(grace_s=DEADLINE_S) as client:
            stays = True
            while stays and (not tokens or tokens[-1] != TURN[-1]):
                async with client.stream(**WHOLE, rid=rid, headers={"X-Belayer-Offset": str(len(tokens))}) as stream:
                    while left:
                        count, incident = left.pop(0)
                        await stream.read(len(stream.tokens) + count)
                        if incident != "engine":
                            stays = incident == "caller"
                            break
                        os.kill(await made.main_pid(), signal.SIGKILL)
                    else:
                        await stream.read()
                tokens += stream.tokens
                logprobs += stream.logprobs
    assert (tokens, logprobs) == (TURN, LOGPROBS)
    assert isinstance((await made.events(rid))[-1], TrajectoryFinished)
    assert await made.findings() == []


class Unreliable(MemoryStore):
    """Loses the replies of some appends, and can be away altogether."""

    def __init__(self) -> None:
        super().__init__()
        self.away = asyncio.Event()
        self.lose_every = 0
        self.appends = 0

    async def append(self, stream: StreamId, entry: Entry, notice_tag: str | None = None) -> None:
        self._answer()
        await super().append(stream, entry, notice_tag)
        self.appends += 1
        if self.lose_every and self.appends % self.lose_every == 0:
            raise JournalUnavailableError("here", 0.0, "the reply was lost")

    async def read(self, stream: StreamId, after_sequence: int = 0, limit: int = 1000) -> list[Entry]:
        self._answer()
        return await super().read(stream, after_sequence, limit)

    def _answer(self) -> None:
        if self.away.is_set():
            raise JournalUnavailableError("here", 0.0, "it is away")


@pytest.fixture
async def unreliable(tmp_path: Path) -> AsyncIterator[tuple[Site, Unreliable]]:
    store = Unreliable()
    async with site(tmp_path, store, tokens_per_s=600) as made:
        await made.worker()
        yield made, store


@pytest.mark.parametrize("lose_every", [2, 3])
async def test_lost_replies_of_the_journal_neither_lose_nor_double_a_token(
    unreliable: tuple[Site, Unreliable], lose_every: int
) -> None:
    made, store = unreliable
    async with made.gateway() as client:
        store.lose_every, store.appends = lose_every, 0
        async with client.stream(**WHOLE, rid="a") as stream:
            await stream.read()
        store.lose_every = 0
    assert (stream.tokens, stream.logprobs) == (TURN, LOGPROBS)
    assert await made.findings() == []


async def test_a_journal_that_comes_back_in_time_only_delays(unreliable: tuple[Site, Unreliable]) -> None:
    made, store = unreliable
    made.hold(150)
    async with made.gateway() as client, client.stream(**WHOLE, rid="a") as stream:
        await stream.read(30)
        store.away.set()
        made.release()
        asyncio.get_running_loop().call_later(0.2, store.away.clear)
        await stream.read()
        assert (stream.tokens, stream.logprobs) == (TURN, LOGPROBS)


async def test_a_journal_that_stays_away_ends_the_stream_and_it_goes_on_later(
    unreliable: tuple[Site, Unreliable],
) -> None:
    made, store = unreliable
    made.hold(150)
    async with made.gateway(journal_wait_s=0.05) as client:
        async with client.stream(**WHOLE, rid="a") as stream:
            await stream.read(30)
            store.away.set()
            made.release()
            await stream.read()
            error = stream.events[-1]["error"]
            assert (error["type"], error["code"]) == ("journal_unavailable", 503) and "same rid" in error["message"]
        assert (await client.ask(**WHOLE, rid="b")).status == 503
        store.away.clear()
        headers = {"X-Belayer-Offset": str(len(stream.tokens))}
        async with client.stream(**WHOLE, rid="a", headers=headers) as rest:
            await rest.read()
        assert stream.tokens + rest.tokens == TURN


async def test_a_trajectory_that_recovery_takes_ends_its_stream_and_waits_for_the_recovery(
    unreliable: tuple[Site, Unreliable],
) -> None:
    made, store = unreliable
    body = {**WHOLE, "trajectory": "t"}
    made.hold(150)
    async with made.gateway() as client:
        async with client.stream(**body, rid="t-1") as stream:
            await stream.read(20)
            recovery, _ = await take_over(store, ids.trajectory("t"), "recovery")
            await recovery.append(RecoveryStarted("box-1", "restore", "recovery"))
            made.release()
            await stream.read()
            assert stream.events[-1]["error"]["type"] == "taken_over"
        again = asyncio.create_task(client.ask(**body, rid="t-2"))
        await recovery.append(Rewound(0, 0, "test"), TrajectoryResumed(0, 0, "box-2"))
        assert (await again).body["output_ids"] == TURN


class DiesBetween(MemoryStore):
    """Is away as soon as it has every token of an answer but not its end."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.away = False

    async def append(self, stream: StreamId, entry: Entry, notice_tag: str | None = None) -> None:
        if self.away:
            raise JournalUnavailableError("here", 0.0, "it is away")
        await super().append(stream, entry, notice_tag)
        if stream.kind == ids.StreamKind.TRAJECTORY:
            generation = fold(await Reader(self, stream).catch_up()).generation
            self.away = generation is not None and generation.count == self.tokens


async def test_an_answer_whose_end_token_fills_a_chunk_is_not_resumed_past_its_end(tmp_path: Path) -> None:
    """Nobody but the engine knows the model's own end token: the journal has it with the end, or has neither."""
    turn = [*range(272, 272 + 255), END]
    store = DiesBetween(len(turn))
    async with site(tmp_path, store, tokens_per_s=1e6, recording=TokenRecording("edge", PROMPT, [turn])) as made:
        await made.worker()
        async with made.gateway(journal_wait_s=0.2) as client:
            assert (await client.ask(**WHOLE, rid="a")).body["output_ids"] == turn
