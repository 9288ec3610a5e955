"""Connections to engines, and what a broken stream says about one.

Invariant: an engine is reported as failed only when its process is gone, or nothing or another engine listens at its
address: a report has it killed, with all its streams. A stream that breaks while the engine is there is that request's
failure alone; a hung engine is for the detector to see. An engine that is dead, because it was found so here or because
the journal says so, has no stream that still waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Literal

import aiohttp

from belayer.errors import JournalError
from belayer.gpu.gateway.workers import Route
from belayer.gpu.http_engine import HttpEngine
from belayer.gpu.incarnation import WRONG_INCARNATION, meant
from belayer.gpu.protocol import EngineProcess
from belayer.journal.events import WorkerRegistered
from belayer.processes import host_name, is_alive

Report = Callable[[str, str, Literal["died", "unreachable"], str], Awaitable[object]]
"""Says in the journal that (worker, incarnation) has failed (how, evidence)."""

_ANSWER_S = 2.0
_log = logging.getLogger("belayer.gateway")
_AGAIN_S = 1.0


class Engines:
    """One client for each incarnation."""

    def __init__(self, report: Report, silence_s: float) -> None:
        self._report = report
        self._silence_s = silence_s
        self._clients: dict[str, HttpEngine] = {}
        self._judged: dict[str, asyncio.Task[bool]] = {}
        self._dead: set[str] = set()

    def connect(self, route: Route) -> HttpEngine:
        """The client for that engine. All that is asked of a dead one fails at once."""
        found = self._clients.get(route.incarnation)
        if found is None:
            at = route.engine.registered
            process = EngineProcess(at.incarnation, at.host, at.pid, at.pid_start_ticks, at.address)
            found = self._clients[route.incarnation] = HttpEngine(process, silence_s=self._silence_s)
        return found

    async def failed(self, route: Route, evidence: str) -> float:
        """A stream of this engine broke: until when (monotonic) that request should avoid it. Reports a dead engine.

        Any number of streams that break together are one look and one report.
        """
        if route.incarnation in self._dead:
            return math.inf
        task = self._judged.get(route.incarnation)
        if task is None:
            task = asyncio.create_task(self._judge(route, evidence))
            self._judged[route.incarnation] = task
            task.add_done_callback(lambda _: self._judged.pop(route.incarnation))
        return math.inf if await asyncio.shield(task) else time.monotonic() + _AGAIN_S

    def ended(self, incarnation: str, why: str) -> None:
        """The engine is dead: end the streams that it has not broken. A host that is gone breaks none."""
        self._dead.add(incarnation)
        if (client := self._clients.get(incarnation)) is not None:
            client.end(why)

    async def close(self) -> None:
        """Close all connections."""
        for task in list(self._judged.values()):
            task.cancel()
        await asyncio.gather(*self._judged.values(), return_exceptions=True)
        for client in self._clients.values():
            await client.close()

    async def _judge(self, route: Route, evidence: str) -> bool:
        kind = await _death(route.engine.registered)
        if kind is None:
            return False
        client = self.connect(route)
        client.end(f"its engine is {kind}: {evidence}")
        try:
            await self._report(route.worker, route.incarnation, kind, evidence)
        except JournalError as error:
            _log.warning(
                "engine %s %s (%s), and the journal was not told: %s", route.incarnation, kind, evidence, error
            )
            self._clients.pop(route.incarnation, None)  # whoever asks it next looks again, and reports
            await client.close()
        else:
            self._dead.add(route.incarnation)
        return True


async def _death(at: WorkerRegistered) -> Literal["died", "unreachable"] | None:
    if at.host == host_name() and not is_alive(at.pid, at.pid_start_ticks):
        return "died"
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    try:
        async with (
            aiohttp.ClientSession(headers=meant(at.incarnation), timeout=timeout) as session,
            session.head(at.address) as response,
        ):
            return "unreachable" if response.status == WRONG_INCARNATION else None
    except aiohttp.ClientConnectorError:
        return "unreachable"
    except (TimeoutError, aiohttp.ClientError, OSError):
        return None  # something is there
