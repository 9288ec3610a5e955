"""Callers who come back, come twice, read slowly, leave, or are too many; and what they are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from belayer import ids
from belayer.actors.archiver import Archiver
from belayer.gpu.recorded_prefix import TokenRecording
from belayer.journal.archive import open_archive
from belayer.journal.archived_store import ArchivedStore
from belayer.journal.events import (
    ActionCommitted,
    EpochStarted,
    GenerationFinished,
    Rewound,
    TrajectoryAborted,
    TrajectoryFinished,
    TrajectoryStarted,
)
from tests.gpu.gateway_site import (
    LOGPROBS,
    PROMPT,
    SECOND_PROMPT,
    SECOND_TURN,
    TURN,
    Site,
    site,
)
from tests.waiting import DEADLINE_S, until

WHOLE: dict[str, Any] = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1000}, "return_logprob": True}
FIRST = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1000}, "trajectory": "t"}


@pytest.fixture
async def quick(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path, tokens_per_s=5000) as made:
        await made.worker()
        yield made


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path, tokens_per_s=300) as made:
        await made.worker()
        yield made


async def test_a_caller_who_comes_back_gets_what_he_lacks(slow: Site) -> None:
    async with slow.gateway(grace_s=DEADLINE_S) as client:
        async with client.stream(**WHOLE, rid="a") as stream:
            await stream.read(30)
        for name in ("X-Belayer-Offset", "Last-Event-ID"):
            async with client.stream(**WHOLE, rid="a", headers={name: str(stream.offset)}) as again:
                await again.read(30)
            stream.tokens += again.tokens
            stream.logprobs += again.logprobs
            stream.offset = again.offset
            assert stream.offset == len(stream.tokens)
        async with client.stream(**WHOLE, rid="a", headers={"X-Belayer-Offset": str(stream.offset)}) as rest:
            await rest.read()
        assert stream.tokens + rest.tokens == TURN and stream.logprobs + rest.logprobs == LOGPROBS
        replayed = await client.ask(**WHOLE, rid="a")
        assert replayed.body["output_ids"] == TURN and replayed.body["meta_info"]["finish_reason"]["type"] == "stop"
        beyond = await client.ask(**WHOLE, rid="a", headers={"X-Belayer-Offset": "302"})
        assert beyond.status == 400 and "beyond the 301 tokens" in beyond.error
    epochs = [event for event in await slow.events("a") if isinstance(event, EpochStarted)]
    assert len(epochs) == 1, "attaching and replaying take no epoch"


async def test_a_repeated_rid_is_one_request_with_one_stream_for_each_caller(slow: Site) -> None:
    async with slow.gateway() as client, client.stream(**WHOLE, rid="a") as first:
        await first.read(10)
        async with client.stream(**WHOLE, rid="a") as second:
            await asyncio.gather(first.read(), second.read())
        assert first.tokens == second.tokens == TURN
        other = await client.ask(input_ids=PROMPT, sampling_params={"max_new_tokens": 5}, rid="a")
        assert other.status == 409 and other.error.startswith("rid_reused")


async def test_a_caller_who_stays_away_has_his_request_aborted_and_is_told(slow: Site) -> None:
    slow.hold(150)
    async with slow.gateway(grace_s=0.02) as client:
        async with client.stream(**WHOLE, rid="a") as stream:
            await stream.read(5)
        assert await until(lambda: _ended(slow, "a"), what="the abort")
        again = await client.ask(**WHOLE, rid="a")
        assert again.status == 410 and "another rid" in again.error
    events = await slow.events("a")
    assert isinstance(events[-1], TrajectoryAborted) and "left" in events[-1].reason
    assert events[-2] == GenerationFinished(1, events[-2].count, "abort")  # type: ignore[union-attr]
    assert await slow.findings() == []


async def _ended(made: Site, name: str) -> bool:
    return isinstance((await made.events(name))[-1], TrajectoryAborted)


async def test_a_request_may_be_brought_to_its_end_without_its_caller(quick: Site) -> None:
    async with quick.gateway(on_disconnect="continue") as client:
        async with client.stream(**WHOLE, rid="a") as stream:
            await stream.read(1)
        replayed = await client.ask(**WHOLE, rid="a")
        assert replayed.body["output_ids"] == TURN


async def test_a_slow_caller_holds_the_engine_and_not_the_memory(tmp_path: Path) -> None:
    turn = list(range(272, 272 + 150_000))
    async with site(tmp_path, tokens_per_s=5e5, recording=TokenRecording("huge", PROMPT, [turn])) as made:
        await made.worker()
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": len(turn)}, "return_logprob": True}
        async with made.gateway(lag_tokens=1000) as client, client.stream(**body, rid="a") as stream:
            await stream.read(1)
            journaled = await until(lambda: _resting(made), what="a paused engine")
            assert journaled < len(turn) / 2
            await stream.read(journaled + 5000)
            assert stream.tokens == turn[: len(stream.tokens)]


async def _resting(made: Site) -> int:
    """How many tokens are journaled, once no more come for half a second."""
    before = await made.events("a")
    grown = await made.store.wait(ids.trajectory("a"), len(before), 0.5)
    chunks = [event for event in before if hasattr(event, "token_ids")]
    return 0 if grown or not chunks else chunks[-1].offset + chunks[-1].count  # type: ignore[union-attr]


async def test_one_too_many_is_told_to_come_again(slow: Site) -> None:
    slow.hold(150)
    async with slow.gateway(max_streams=1) as client, client.stream(**WHOLE, rid="a") as stream:
        await stream.read(1)
        refused = await client.ask(**WHOLE, rid="b")
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1") and "max-streams" in refused.error
        slow.release()
        await stream.read()
        assert stream.tokens == TURN


async def test_a_request_that_takes_too_long_is_aborted(slow: Site) -> None:
    slow.hold(150)
    async with slow.gateway(request_timeout_s=0.4) as client, client.stream(**WHOLE, rid="a") as stream:
        await stream.read()
        assert stream.events[-1]["error"]["code"] == 504 and len(stream.tokens) <= 150
        assert (await client.ask(**WHOLE, rid="b")).status == 504
    assert await slow.findings() == []


async def test_the_turns_of_a_trajectory_follow_each_other(quick: Site) -> None:
    async with quick.gateway() as client:
        await client.ask(**FIRST, rid="t-1")
        second = await client.ask(**{**FIRST, "input_ids": SECOND_PROMPT}, rid="t-2")
        assert second.body["output_ids"] == SECOND_TURN
        replayed = await client.ask(**FIRST, rid="t-1")
        assert replayed.body["output_ids"] == TURN, "an earlier turn is still there"
        differs = await client.ask(**{**FIRST, "input_ids": [*PROMPT, *TURN, 7]}, rid="t-3")
        assert differs.status == 409 and "prompt_differs" in differs.error
    events = await quick.events("t")
    given = [event for event in events if isinstance(event, ActionCommitted)]
    assert len(given) == 1 and sum(isinstance(event, TrajectoryStarted) for event in events) == 1
    assert await quick.findings() == []


async def test_a_turn_that_is_asked_for_again_takes_the_place_of_the_first(quick: Site) -> None:
    async with quick.gateway() as client:
        await client.ask(**{**FIRST, "sampling_params": {"max_new_tokens": 5}}, rid="t-1")
        again = await client.ask(**FIRST, rid="t-1b")
        assert again.body["output_ids"] == TURN
        second = await client.ask(**{**FIRST, "input_ids": SECOND_PROMPT}, rid="t-2")
        again = await client.ask(**{**FIRST, "input_ids": SECOND_PROMPT}, rid="t-2b")
        assert second.body["output_ids"] == again.body["output_ids"] == SECOND_TURN
    events = await quick.events("t")
    assert sum(isinstance(event, Rewound) for event in events) == 2
    assert await quick.findings() == []


async def test_a_trajectory_generates_for_one_request_at_a_time(slow: Site) -> None:
    slow.hold(150)
    async with slow.gateway() as client, client.stream(**FIRST, rid="t-1") as stream:
        await stream.read(1)
        busy = await client.ask(**FIRST, rid="t-2")
        assert busy.status == 409 and "t-1 generates in trajectory t" in busy.error


WRONG = [
    ({}, 400, "either input_ids"),
    ({"input_ids": [[1], [2]]}, 400, "Expected `int`"),
    ({"input_ids": [-1]}, 400, ">= 0"),
    ({"input_ids": PROMPT, "nosuch": 1}, 400, "unknown field `nosuch`"),
    ({"input_ids": PROMPT, "top_logprobs_num": 3}, 400, "top_logprobs_num=3"),
    ({"input_ids": PROMPT, "sampling_params": {"frequency_penalty": 0.5}}, 400, "params.frequency_penalty=0.5"),
    ({"input_ids": PROMPT, "sampling_params": {"regex": "a+"}}, 400, "sampling_params.regex"),
    ({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 0}}, 400, ">= 1"),
    ({"input_ids": PROMPT, "sampling_params": {"stop": "x"}}, 400, "--tokenizer"),
    ({"text": "hello"}, 400, "--tokenizer"),
    ({"input_ids": PROMPT, "rid": "a/b"}, 400, "usable name"),
    ({"input_ids": [1, 2, 3]}, 400, "not the recording's"),
]


async def test_a_wrong_request_is_told_what_is_wrong(quick: Site) -> None:
    async with quick.gateway() as client:
        for body, status, said in WRONG:
            answer = await client.ask(**body)
            assert (answer.status, answer.body["error"]["code"]) == (status, status)
            assert said in answer.error, answer


async def test_values_that_change_nothing_are_taken(quick: Site) -> None:
    neutral = {"frequency_penalty": 0.0, "repetition_penalty": 1.0, "n": 1, "stop": [], "json_schema": None}
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3, **neutral}, "logprob_start_len": -1}
    async with quick.gateway() as client:
        assert (await client.ask(**body)).body["output_ids"] == TURN[:3]
        lost = await client.get("/nosuch")
        assert lost.status == 404 and "/nosuch" in lost.error


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 300), max_size=4))
def test_a_stream_read_in_any_pieces_is_the_same(tmp_path: Path, cuts: list[int]) -> None:
    async def run() -> None:
        async with site(tmp_path, tokens_per_s=20_000) as made:
            await made.worker()
            async with made.gateway(grace_s=DEADLINE_S) as client:
                tokens: list[int] = []
                logprobs: list[float] = []
                for count in [*cuts, 1 << 30]:
                    headers = {"X-Belayer-Offset": str(len(tokens))}
                    async with client.stream(**WHOLE, rid="a", headers=headers) as stream:
                        await stream.read(count)
                    tokens += stream.tokens
                    logprobs += stream.logprobs
                assert (tokens, logprobs) == (TURN, LOGPROBS)

    asyncio.run(run())


async def test_an_answer_that_was_archived_says_where_it_is(quick: Site, tmp_path: Path) -> None:
    archive = open_archive(str(tmp_path / "archive"))
    async with quick.gateway() as client:
        await client.ask(**WHOLE, rid="a")
        await until(lambda: _is_finished(quick, "a"), what="the trajectory's end")
        assert await Archiver(quick.store, archive, "archiver/test").archive(["a"]) == {"a": None}
        gone = await client.ask(**WHOLE, rid="a")
        assert gone.status == 410 and gone.error.startswith("archived") and "--archive" in gone.error
    made = Site(ArchivedStore(quick.store, archive), quick.host, quick.recovery, quick.held)
    async with made.gateway() as client:
        assert (await client.ask(**WHOLE, rid="a")).body["output_ids"] == TURN


async def _is_finished(made: Site, name: str) -> bool:
    return isinstance((await made.events(name))[-1], TrajectoryFinished)
