"""The gateway before real recorded engines: one unbroken stream, whatever happens behind it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from belayer.gpu.http_engine import HttpEngine
from belayer.gpu.protocol import EngineProcess, Sampling
from belayer.journal.events import GenerationResumed, TrajectoryFinished
from tests.gpu.gateway_site import LOGPROBS, PROMPT, TURN, Site, site

WHOLE = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1000}, "return_logprob": True}


@pytest.fixture
async def quick(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as made:
        await made.worker()
        yield made


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path, tokens_per_s=500) as made:
        await made.worker(shadow=True)
        yield made


async def test_whole_and_streamed_answers_are_the_engines_own(quick: Site) -> None:
    async with quick.gateway() as client:
        whole = await client.ask(**WHOLE, rid="a")
        info = whole.body["meta_info"]
        assert (whole.status, whole.body["output_ids"]) == (200, TURN)
        assert [entry[0] for entry in info["output_token_logprobs"]] == LOGPROBS
        assert (info["prompt_tokens"], info["completion_tokens"], info["id"]) == (len(PROMPT), len(TURN), "a")
        assert info["finish_reason"] == {"type": "stop", "matched": TURN[-1]} and info["resumes"] == 0
        async with client.stream(**WHOLE, rid="b") as stream:
            await stream.read()
        assert (stream.tokens, stream.logprobs, stream.finish) == (TURN, LOGPROBS, info["finish_reason"])
        assert stream.info["completion_tokens"] == stream.offset == len(TURN) and len(stream.events) > 1
        short = await client.ask(input_ids=PROMPT, sampling_params={"max_new_tokens": 7})
        assert short.body["meta_info"]["finish_reason"] == {"type": "length", "length": 7}
        assert short.body["output_ids"] == TURN[:7] and "output_token_logprobs" not in short.body["meta_info"]
    assert isinstance((await quick.events("a"))[-1], TrajectoryFinished)
    assert await quick.findings() == []


async def test_the_engines_client_takes_the_gateway_for_an_engine(quick: Site) -> None:
    async with quick.gateway() as client:
        engine = HttpEngine(EngineProcess("any", "here", 1, 1, client.address), silence_s=5)
        batches = [batch async for batch in engine.generate("c", PROMPT, Sampling(max_new_tokens=1000))]
        await engine.close()
    assert [token for batch in batches for token in batch.token_ids] == TURN
    assert [value for batch in batches for value in batch.logprobs] == LOGPROBS


async def test_an_engine_killed_in_mid_stream_is_not_seen_by_its_callers(slow: Site) -> None:
    slow.hold(150)
    async with slow.gateway() as client, client.stream(**WHOLE, rid="a") as stream:
        whole = asyncio.create_task(client.ask(**WHOLE, rid="b"))
        await stream.read(50)
        os.kill(await slow.main_pid(), signal.SIGKILL)
        slow.release()
        await stream.read()
        assert (stream.tokens, stream.logprobs) == (TURN, LOGPROBS)
        assert stream.info["completion_tokens"] == len(TURN) and stream.info["prompt_tokens"] == len(PROMPT)
        assert stream.info["resumes"] == 1 and stream.done
        answered = await whole
        assert answered.body["output_ids"] == TURN and answered.body["meta_info"]["resumes"] <= 1
    resumed = [event for event in await slow.events("a") if isinstance(event, GenerationResumed)]
    assert resumed and all(0 < event.offset < len(TURN) for event in resumed)
    assert len(slow.reports) == 1, "many broken streams are one report"
