"""Which engine a request goes to, from the workers' streams in the journal.

Invariant: an engine is given out only while the journal calls it the ready main of its worker and it serves the
current weight version: the newest that its run has published or that any of the workers serves. An engine is its
incarnation; one that came back is another. When the journal does not answer, what was read last holds.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from belayer import ids
from belayer.errors import JournalUnavailableError
from belayer.gpu.gateway.errors import later
from belayer.journal.store import JournalStore
from belayer.journal.writer import Reader
from belayer.projections import run, worker
from belayer.projections.run import RunState
from belayer.projections.worker import EngineState, WorkerState

_AGAIN_S = 0.2
_LOOK_S = 10.0
_DEAD = ("failed", "removed")


@dataclass(frozen=True, slots=True)
class Route:
    """An engine that a request may go to."""

    worker: str
    engine: EngineState

    @property
    def incarnation(self) -> str:
        return self.engine.registered.incarnation


class Workers:
    """Follows the streams of some workers and of their runs. An async context.

    `ended` is told (incarnation, why) once of each engine that the journal calls dead.
    """

    def __init__(self, store: JournalStore, names: Sequence[str], ended: Callable[[str, str], None]) -> None:
        self._store = store
        self._engine_ended = ended
        self.states: dict[str, WorkerState] = {name: worker.EMPTY for name in names}
        self._runs: dict[str, RunState] = {}
        self._changed = asyncio.Event()
        self._known: dict[str, asyncio.Event] = {name: asyncio.Event() for name in names}
        self._tasks: list[asyncio.Task[None]] = []
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done with the error when a stream cannot be followed any more: a bug, or a damaged journal."""

    async def __aenter__(self) -> Workers:
        for name in self.states:
            self._start(self._follow_worker(name))
        known = asyncio.gather(*(known.wait() for known in self._known.values()))
        await asyncio.wait([known, self.broken], return_when=asyncio.FIRST_COMPLETED)
        if self.broken.done():
            known.cancel()
            await self._stop()
            self.broken.result()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()
        self.broken.cancel()

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def weight_version(self) -> int:
        """The current one."""
        serving = [state.serving.weight_version for state in self.states.values() if state.serving is not None]
        return max([*serving, *(state.weight_version for state in self._runs.values())], default=0)

    @property
    def run(self) -> str:
        """The run that the workers belong to."""
        return next((state.run for state in self.states.values() if state.run), "")

    def route(self, name: str) -> Route | None:
        """The worker's engine, if requests may go to it."""
        engine = self.states[name].serving
        return Route(name, engine) if engine is not None and engine.weight_version >= self.weight_version else None

    async def pick(self, key: str, avoid: Mapping[str, float], wait_s: float, handover_wait_s: float) -> Route:
        """The engine for this key: always the same one while it serves, so that its cache is warm.

        `avoid`: incarnations, and until when (monotonic). A worker whose shadow is about to take over is waited for
        before another is taken. An engine that is to be replaced is taken only if there is no other. RefusedError (503)
        when there is no engine within `wait_s`.
        """
        order = sorted(self.states, key=lambda name: hashlib.blake2b(f"{key}/{name}".encode()).digest())
        begun = time.monotonic()
        while True:
            now = time.monotonic()
            draining: Route | None = None
            for name in order:
                route = self.route(name)
                if route is not None and avoid.get(route.incarnation, 0.0) <= now:
                    if not route.engine.draining:
                        return route
                    draining = draining or route
                elif now < begun + handover_wait_s and self.states[name].shadow is not None:
                    break
            if draining is not None:
                return draining
            if now >= begun + wait_s:
                raise later("no_engine", f"{self._why()}; the same request may be made again", 2)
            due = [begun + wait_s, begun + handover_wait_s, *avoid.values()]
            await self._change(min(at for at in due if at > now) - now)

    def _why(self) -> str:
        return f"no engine of {', '.join(self.states)} is ready and serves weight version {self.weight_version}"

    async def _change(self, timeout_s: float) -> None:
        """Return when anything has changed, or the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _say_dead(self, before: Mapping[str, EngineState], now: Mapping[str, EngineState]) -> None:
        for name, engine in now.items():
            if engine.status in _DEAD and (name not in before or before[name].status not in _DEAD):
                self._engine_ended(name, f"the journal calls its engine {engine.status}: {engine.evidence}")

    def _start(self, following: object) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(following)  # type: ignore[arg-type]
        self._tasks.append(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self.broken.done():
            self.broken.set_exception(error)

    async def _follow_worker(self, name: str) -> None:
        reader = Reader(self._store, ids.worker(name))
        while True:
            try:
                before = self.states[name].engines
                self.states[name] = worker.fold(await reader.catch_up(), self.states[name])
                self._say_dead(before, self.states[name].engines)
                run_name = self.states[name].run
                if run_name and run_name not in self._runs:
                    self._runs[run_name] = run.EMPTY
                    self._start(self._follow_run(run_name))
                self._known[name].set()
                self._tell()
                await reader.wait(_LOOK_S)
            except JournalUnavailableError:
                await asyncio.sleep(_AGAIN_S)

    async def _follow_run(self, name: str) -> None:
        reader = Reader(self._store, ids.run(name))
        while True:
            try:
                self._runs[name] = run.fold(await reader.catch_up(), self._runs[name])
                self._tell()
                await reader.wait(_LOOK_S)
            except JournalUnavailableError:
                await asyncio.sleep(_AGAIN_S)
