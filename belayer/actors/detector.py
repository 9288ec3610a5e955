"""Sees containers and engines fail, at once, and says so in the journal: a container by its pidfd, an engine as its
host watches it (its end, and a silence that its work does not allow). It also says which weights a serving engine has,
each time they were updated.

The watch is the work on the notice that made the process known: the notice is renewed as long as the process lives,
so when a detector dies its watches go stale and come to another, which finds a death that nobody saw. A process that
is removed on purpose is called removed in the journal before it is killed; reporting looks there first and then says
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib

from belayer import ids
from belayer.actors.projector import Projector
from belayer.actors.reports import report_engine_failure, report_sandbox_failure, report_weights
from belayer.actors.worker_recovery import process_of
from belayer.errors import JournalUnavailableError
from belayer.gpu.protocol import EngineHost
from belayer.ids import StreamKind
from belayer.journal.events import WorkerRegistered
from belayer.journal.store import JournalStore, Notice
from belayer.processes import wait_exit
from belayer.projections import sandbox, worker

_AGAIN_S = 0.5


class Detector:
    """Watches the containers and engines of one host."""

    name = "detector"
    tags = frozenset({"sandbox-created", "sandbox-restored", "worker-registered"})
    concurrency = 100_000
    stale_after_s = 4.0

    def __init__(self, store: JournalStore, engines: EngineHost, host_name: str, by: str) -> None:
        self._store = store
        self._engines = engines
        self._host_name = host_name
        self._by = by
        self._sandboxes = Projector(store, ids.sandbox, sandbox.fold, sandbox.EMPTY)
        self._workers = Projector(store, ids.worker, worker.fold, worker.EMPTY)
        self._watched: set[str] = set()

    async def handle(self, notice: Notice) -> None:
        """Watch until the process has ended and, if that was a failure, the journal says so."""
        match notice.stream.kind:
            case StreamKind.SANDBOX:
                await self._watch_sandbox(notice.stream.name)
            case StreamKind.WORKER:
                await self._watch_worker(notice.stream.name)
            case StreamKind.TRAJECTORY | StreamKind.RUN:
                pass

    async def _watch_sandbox(self, name: str) -> None:
        state = await self._sandboxes.look(name)
        container = state.container
        if state.phase != "live" or container is None or container.host != self._host_name:
            return
        if not self._begin(container.incarnation):
            return
        try:
            await wait_exit(container.pid, container.pid_start_ticks)
        finally:
            self._watched.discard(container.incarnation)
        evidence = f"process 1 of the container (host pid {container.pid}) ended"
        await report_sandbox_failure(self._store, name, container.incarnation, "died", evidence, self._by)

    async def _watch_worker(self, name: str) -> None:
        state = await self._workers.look(name)
        async with asyncio.TaskGroup() as watches:
            for incarnation, engine in state.engines.items():
                if engine.status in ("starting", "ready") and engine.registered.host == self._host_name:
                    watches.create_task(self._watch_engine(name, incarnation, engine.registered))

    async def _watch_engine(self, name: str, incarnation: str, registered: WorkerRegistered) -> None:
        if not self._begin(incarnation):
            return
        weights = asyncio.create_task(self._follow_weights(name, incarnation))
        try:
            failure = await self._engines.watch(process_of(registered))
        finally:
            self._watched.discard(incarnation)
            weights.cancel()
            await asyncio.wait((weights,))
        await report_engine_failure(self._store, name, incarnation, failure.kind, failure.evidence, self._by)

    async def _follow_weights(self, name: str, incarnation: str) -> None:
        async with contextlib.aclosing(self._engines.weight_versions()) as versions:
            async for version in versions:
                await self._say_weights(name, incarnation, version)

    async def _say_weights(self, name: str, incarnation: str, version: int) -> None:
        while True:
            try:
                await report_weights(self._store, name, incarnation, version, self._by)
                return
            except JournalUnavailableError:
                await asyncio.sleep(_AGAIN_S)

    def _begin(self, incarnation: str) -> bool:
        """False when a notice of ours already watches it."""
        if incarnation in self._watched:
            return False
        self._watched.add(incarnation)
        return True
