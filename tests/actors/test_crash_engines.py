"""Crash, or be overtaken, between any two steps of what recovers a worker's engines.

Whatever happens in whatever order, at the end one main serves, at most one shadow stands by, and no engine is left that
the journal does not name.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from belayer.actors.reports import report_engine_failure
from belayer.actors.worker_recovery import WorkerRecovery, look
from belayer.errors import EngineFailedError, FencedError, WrongSequenceError
from belayer.gpu.protocol import EngineProcess, Handover
from belayer.journal.memory_store import MemoryStore
from replay.audit import audit
from tests.actors.model import CrashError, Fuse, Fused
from tests.actors.test_crash_anywhere import journaled, strikes


class ModelEngines:
    """An EngineHost in memory: which engines live, in which role, and who had started them when he died."""

    def __init__(self) -> None:
        self.alive: dict[str, EngineProcess] = {}
        self.mains: set[str] = set()
        self.orphans: set[str] = set()
        self._pid = 0

    async def start(self, incarnation: str, role: Literal["main", "shadow"]) -> EngineProcess:
        self._pid += 1
        self.alive[incarnation] = EngineProcess(incarnation, "host", self._pid, 1, "")
        if role == "main":
            self.mains.add(incarnation)
        return self.alive[incarnation]

    async def promote(self, shadow: EngineProcess, old: EngineProcess | None = None) -> Handover:
        if old is not None:
            await self.kill(old)
        if shadow.incarnation not in self.alive:
            raise EngineFailedError(shadow.incarnation, "it is dead")
        self.mains.add(shadow.incarnation)
        return Handover({})

    async def strays(self, worker: str) -> list[EngineProcess]:
        return [self.alive[name] for name in sorted(self.orphans & set(self.alive))]

    async def kill(self, engine: EngineProcess) -> None:
        self.alive.pop(engine.incarnation, None)


class Host(Fused):
    """The engines through the fuse; what tells of weights does not go through it."""

    async def weight_versions(self) -> AsyncGenerator[int]:
        yield 3


class Engines(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.store, self.engines, self.fuse = MemoryStore(), ModelEngines(), Fuse()
        self.fused_store, self.fused_engines = Fused(self.store, self.fuse), Host(self.engines, self.fuse)
        first: Any = self.fused_engines
        self.loop.run_until_complete(WorkerRecovery(self.store, first, "host", "start").start("w", "run"))

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            for _ in range(3):
                self.loop.run_until_complete(self.do(self.detector))
                self.loop.run_until_complete(self.do(self.recovery))
            self.check_end()
        finally:
            self.loop.close()

    def check_end(self) -> None:
        state = self.loop.run_until_complete(look(self.store, "w"))
        named = {name for name, engine in state.engines.items() if engine.status == "ready"}
        assert state.serving is not None and state.shadow is not None and len(named) == 2
        assert set(self.engines.alive) == named
        assert self.engines.mains & set(self.engines.alive) == {state.main}
        assert audit(self.loop.run_until_complete(journaled(self.store))).findings == []

    async def detector(self) -> None:
        state = await look(self.store, "w")
        for name, engine in state.engines.items():
            if engine.status == "ready" and name not in self.engines.alive:
                await report_engine_failure(self.fused_store, "w", name, "died", "gone", "detector")

    async def recovery(self) -> None:
        await WorkerRecovery(self.fused_store, self.fused_engines, "host", "recovery").recover("w")

    async def do(self, work: Callable[[], Awaitable[None]]) -> None:
        """Let someone work until done, dead or overtaken. The engines that a dead one has started are orphans."""
        try:
            with contextlib.suppress(FencedError, WrongSequenceError):
                await work()
        except CrashError:
            self.engines.orphans |= set(self.engines.alive)
        self.fuse.clear()

    @rule(who=st.sampled_from(["detector", "recovery"]), strike=strikes)
    def work_and_maybe_die(self, who: str, strike: tuple[int, bool] | None) -> None:
        async def die() -> None:
            raise CrashError

        if strike is not None:
            self.fuse.set(strike[0], strike[1], die)
        self.loop.run_until_complete(self.do(getattr(self, who)))

    @rule(
        who=st.sampled_from(["detector", "recovery"]),
        others=st.lists(st.sampled_from(["detector", "recovery", "main", "shadow"]), min_size=1, max_size=5),
        at=st.integers(0, 20),
        after=st.booleans(),
    )
    def pause_while_others_work(self, who: str, others: list[str], at: int, after: bool) -> None:
        async def intrude() -> None:
            for other in others:
                if other in ("main", "shadow"):
                    self.kill(other)
                else:
                    await self.do(getattr(self, other))

        self.fuse.set(at, after, intrude)
        self.loop.run_until_complete(self.do(getattr(self, who)))

    @rule(role=st.sampled_from(["main", "shadow"]))
    def kill(self, role: str) -> None:
        for name in list(self.engines.alive):
            if (name in self.engines.mains) == (role == "main"):
                del self.engines.alive[name]


Engines.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestCrashEngines = Engines.TestCase
