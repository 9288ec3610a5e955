"""Requests resume on a shadow in one group through the gateway; one of their callers does not read.

The engines speak as SGLang does with Belayer's plugin: many requests in one, with what a request has said named by its
id on the dead engine. The recorded engine knows no groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Literal

import aiohttp
from aiohttp import web

from belayer import ids
from belayer.gpu.gateway.server import serving
from belayer.gpu.gateway.settings import Settings
from belayer.gpu.http_engine import RESUME_KEY
from belayer.journal.events import FailureDetected, HandoverCompleted, WorkerReady, WorkerRegistered
from belayer.journal.memory_store import MemoryStore
from belayer.journal.writer import take_over
from tests.gpu.gateway_site import Client, Stream, small_socket
from tests.gpu.test_http_engine import event
from tests.waiting import until, within

PROMPT = list(range(3, 43))
MANY, FEW = 150_000, 60
"""Tokens of the request that nobody reads, more than all buffers on its way hold, and of the other one."""
FIRST = 10
TURN = [3 + at % 500 for at in range(MANY)]


class Engine:
    """One incarnation, which answers every request with TURN."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        """The ids of each request."""
        self.aborted: set[str] = set()
        self.address = ""
        self.dies: asyncio.Event | None = None
        """When it does; each request gets FIRST tokens before. None: it lives."""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Engine]:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        self.site = web.TCPSite(runner, "127.0.0.1", 0)
        await self.site.start()
        self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.add((await request.json())["rid"])
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body["rid"])
        names, inputs, samplings = (
            one if isinstance(body["rid"], list) else [one]
            for one in (body["rid"], body["input_ids"], body["sampling_params"])
        )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        running = [_Running(*one) for one in zip(names, inputs, samplings, strict=True)]
        with suppress(ConnectionError):
            if self.dies is not None:
                for one in running:
                    await response.write(one.more(FIRST))
                await self.dies.wait()
                assert request.transport is not None
                request.transport.abort()
            while running:
                running = [one for one in running if one.left and one.name not in self.aborted]
                for one in running:
                    await response.write(one.more(512 if one.left > FEW else 1))
        return response


class _Running:
    """A request on an engine."""

    def __init__(self, name: str, input_ids: list[int], sampling: dict[str, Any]) -> None:
        resumed = sampling.get("custom_params", {}).get(RESUME_KEY, ["", len(input_ids)])
        self.name = name
        self.left: int = sampling["max_new_tokens"]
        self._had: int = resumed[1] - len(PROMPT)
        self._sent = 0

    def more(self, count: int) -> bytes:
        count = min(count, self.left)
        self.left -= count
        start, self._sent = self._had + self._sent, self._sent + count
        finish = None if self.left else {"type": "length", "length": self._sent}
        return event(TURN[start : start + count], self._sent, finish, name=self.name)


async def test_who_is_not_read_leaves_the_group_and_costs_neither_memory_nor_the_others() -> None:
    dying, shadow, store = Engine(), Engine(), MemoryStore()
    dying.dies = asyncio.Event()
    writer, _ = await take_over(store, ids.worker("w"), "test")
    reports: list[str] = []

    async def report(worker: str, incarnation: str, kind: Literal["died", "unreachable"], evidence: str) -> None:
        """And the recovery that follows it."""
        reports.append(incarnation)
        await writer.append(FailureDetected(incarnation, kind, evidence, "gateway"))
        await writer.append(HandoverCompleted("e1", "e2", 0.1))

    async def asked(client: Client, name: str, count: int) -> Stream:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": count}, "return_logprob": True}
        stream = await stack.enter_async_context(client.stream(**body, rid=name))
        return await stream.read(FIRST)

    async with AsyncExitStack() as stack:
        for engine in (dying, shadow):
            await stack.enter_async_context(engine.listening())
        main = WorkerRegistered("e1", "main", "elsewhere", 1, 1, dying.address, "run")
        standby = WorkerRegistered("e2", "shadow", "elsewhere", 1, 1, shadow.address, "run")
        await writer.append(main, WorkerReady("e1", 0), standby, WorkerReady("e2", 0))
        settings = Settings(adopts_kv=True, lag_tokens=1000, silence_s=1000, drain_s=0, grace_s=10)
        served = await stack.enter_async_context(serving(store, ["w"], report, settings, None, "127.0.0.1", 0))
        connector = aiohttp.TCPConnector(socket_factory=small_socket)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        client = Client(served.address, session)
        unread, quick = await asked(client, "unread", MANY), await asked(client, "quick", FEW)
        await dying.site.stop()
        dying.dies.set()
        await within(quick.read())
        assert quick.tokens == TURN[:FEW] and quick.info["resumes"] == 1
        again = await until(
            lambda: shadow.aborted and _of_unread(shadow.asked) - shadow.aborted, 30, "asking for it again"
        )
        (gone,) = shadow.aborted
        assert gone in _of_unread(shadow.asked) and again != {gone}, "it left, and came back by itself"
        await within(unread.read())
        assert unread.tokens == TURN and unread.info["resumes"] == 1
    assert reports == ["e1"], "the engine that it left keeps its good name"


def _of_unread(asked: list[Any]) -> set[str]:
    """The ids that the request had; those that resume in the same millisecond were asked for together."""
    names = [name for one in asked for name in (one if isinstance(one, list) else [one])]
    return {name for name in names if name.startswith("unread")}
