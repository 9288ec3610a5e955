"""A stream of a dead engine ends though nothing of it breaks: the host is gone, or shuts down, or never answers."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from belayer.actors.reports import report_engine_failure
from belayer.actors.worker_recovery import look
from belayer.errors import EngineFailedError, JournalUnavailableError
from belayer.gpu.gateway.engines import Engines
from belayer.gpu.gateway.workers import Route
from belayer.gpu.protocol import Sampling
from belayer.journal.events import WorkerRegistered
from belayer.projections.worker import EngineState
from tests.gpu.gateway_site import PROMPT, TURN, site
from tests.gpu.test_http_engine import event
from tests.waiting import within


@pytest.mark.parametrize("resumes", ["", "old"])
@pytest.mark.parametrize("journal", ["there", "away"])
async def test_a_stream_ends_when_another_finds_its_engine_dead(resumes: str, journal: str) -> None:
    """The engine listens no more, and of its two streams one is broken, the other silent."""
    breaking, over = asyncio.Event(), asyncio.Event()
    reports: list[tuple[Any, ...]] = []

    async def generate(request: web.Request) -> web.StreamResponse:
        name = (await request.json())["rid"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event([7], 1, name=name))
        if name == "breaks":
            await breaking.wait()
            assert request.transport is not None
            request.transport.abort()
        await over.wait()
        return response

    async def report(*said: Any) -> None:
        reports.append(said)
        if journal == "away":
            raise JournalUnavailableError("here", 0.0, "away")

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listening = web.TCPSite(runner, "127.0.0.1", 0)
    await listening.start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    route = Route("w", EngineState(WorkerRegistered("e", "main", "elsewhere", 1, 1, address, "run"), "ready"))
    engines = Engines(report, silence_s=1000)

    async def rest(name: str, resumes: str, begun: asyncio.Event) -> None:
        stream = engines.connect(route).generate(name, list(range(40)), Sampling(9), resumes=resumes)
        async with aclosing(stream) as batches:
            async for _ in batches:
                begun.set()

    begun = [asyncio.Event(), asyncio.Event()]
    silent = asyncio.create_task(rest("silent", resumes, begun[0]))
    broken = asyncio.create_task(rest("breaks", "", begun[1]))
    for one in begun:
        await one.wait()
    await listening.stop()
    breaking.set()
    with pytest.raises(EngineFailedError, match="broke after 1 tokens") as error:
        await broken
    assert await engines.failed(route, error.value.evidence) == float("inf")
    with pytest.raises(EngineFailedError, match="its engine is unreachable"):
        await within(silent)
    with pytest.raises(EngineFailedError):
        await within(rest("later", resumes, asyncio.Event()))
    await engines.failed(route, "again")
    assert [said[2] for said in reports] == ["unreachable"] * (1 if journal == "there" else 2), "told until it is known"
    over.set()
    await engines.close()
    await runner.cleanup()


async def test_a_stream_leaves_an_engine_that_the_journal_calls_dead(tmp_path: Path) -> None:
    """Its process stands still, as a host does that is gone: no connection breaks, and none is refused."""
    async with site(tmp_path, tokens_per_s=300) as made:
        await made.worker("w")
        made.hold(150)
        async with made.gateway("w v", silence_s=1000, handover_wait_s=0) as client:
            async with client.stream(input_ids=PROMPT, sampling_params={"max_new_tokens": 1000}, rid="a") as stream:
                await stream.read(20)
                os.kill(await made.main_pid("w"), signal.SIGSTOP)
                await made.worker("v")
                main = (await look(made.store, "w")).main
                await report_engine_failure(made.store, "w", main, "hung", "it stands still", "test")
                made.release()
                await within(stream.read())
            assert stream.tokens == TURN and stream.info["resumes"] == 1
            assert await made.findings() == []
