"""Starts a worker's engines, replaces the main when it fails, and keeps a shadow armed.

Handover: RecoveryStarted, prove the old main dead, promote the shadow, HandoverCompleted and WorkerReady in one
append. Without a shadow a new main is started instead. Arming another shadow is work of its own, begun by the notice
of the handover, so that nobody waits for it. An engine that no event names is removed by the reaper.
"""

from __future__ import annotations

import time

from belayer import ids
from belayer.actors.patience import settled
from belayer.errors import EngineFailedError, FencedError
from belayer.gpu.protocol import EngineHost, EngineProcess
from belayer.journal.events import (
    AnyEvent,
    FailureDetected,
    HandoverCompleted,
    RecoveryStarted,
    WorkerReady,
    WorkerRegistered,
)
from belayer.journal.store import JournalStore
from belayer.journal.writer import Reader, StreamWriter, take_over
from belayer.projections.worker import EngineState, WorkerState, fold


def process_of(engine: EngineState | WorkerRegistered) -> EngineProcess:
    """The engine as the gpu package knows it."""
    registered = engine.registered if isinstance(engine, EngineState) else engine
    return EngineProcess(
        registered.incarnation, registered.host, registered.pid, registered.pid_start_ticks, registered.address
    )


async def look(store: JournalStore, name: str) -> WorkerState:
    """The worker's state as of now."""
    return fold(await Reader(store, ids.worker(name)).catch_up())


class WorkerRecovery:
    """Recovers the engine workers of one host."""

    def __init__(
        self,
        store: JournalStore,
        host: EngineHost,
        host_name: str,
        by: str,
        weight_version: int = 0,
        patience_s: float = 0.0,
    ) -> None:
        """`patience_s`: how long a step of a recovery that another has begun may take before it is taken for dead."""
        self._store = store
        self._patience_s = patience_s
        self._host = host
        self._host_name = host_name
        self._by = by
        self._weight_version = weight_version

    async def start(self, name: str, run: str) -> WorkerState:
        """Start the worker's first main engine. A worker that has one is left as it is."""
        writer, history = await take_over(self._store, ids.worker(name), self._by)
        if not fold(history).main:
            await self._start_main(writer, name, run)
        return await look(self._store, name)

    async def recover(self, name: str) -> None:
        """Replace the main if it has failed, and arm a shadow if there is none; what is in order is left alone."""
        state = await settled(
            self._store,
            ids.worker(name),
            lambda: look(self._store, name),
            lambda state: state.recovery_epoch if state.recovering else None,
            self._host_name,
            self._patience_s,
        )
        if not self._here(state):
            return
        if state.serving is None:
            await self._replace_main(name, state.sequence)
            state = await look(self._store, name)
        if state.serving is not None and state.shadow is None:
            await self._arm(name)

    def _here(self, state: WorkerState) -> bool:
        main = state.engines.get(state.main)
        return main is not None and main.status != "removed" and main.registered.host == self._host_name

    async def _replace_main(self, name: str, seen: int) -> None:
        writer, history = await take_over(self._store, ids.worker(name), self._by, only_at=seen)
        state = fold(history)
        if state.serving is not None or not self._here(state):
            return
        started = time.monotonic()
        old = state.engines[state.main]
        await writer.append(
            RecoveryStarted(state.main, "hand over to the shadow" if state.shadow else "start anew", self._by)
        )
        await self._host.kill(process_of(old))
        if (shadow := state.shadow) is not None:
            new = shadow.registered.incarnation
            try:
                await self._host.promote(process_of(shadow))
            except EngineFailedError as error:
                await writer.append(FailureDetected(new, "unreachable", error.evidence, self._by))
                await self._host.kill(process_of(shadow))
            else:
                took_s = time.monotonic() - started
                await writer.append(HandoverCompleted(state.main, new, took_s), WorkerReady(new, shadow.weight_version))
                return
        await self._start_main(writer, name, state.run)

    async def _arm(self, name: str) -> None:
        """Start a shadow, then register it: the slow part holds no epoch that a handover would wait for."""
        state = await look(self._store, name)
        incarnation = f"{name}-{ids.new_suffix()}"
        shadow = await self._host.start(incarnation, "shadow")
        try:
            writer, history = await take_over(self._store, ids.worker(name), self._by)
            now = fold(history)
            if now.shadow is not None or (now.main != state.main and now.serving is None):
                await self._host.kill(shadow)
                return
            await writer.append(
                self._registered(shadow, "shadow", state.run), WorkerReady(incarnation, self._weight_version)
            )
        except FencedError:
            await self._host.kill(shadow)
            raise

    async def _start_main(self, writer: StreamWriter, name: str, run: str) -> None:
        incarnation = f"{name}-e{writer.epoch}"
        main = await self._host.start(incarnation, "main")
        events: tuple[AnyEvent, ...] = (
            self._registered(main, "main", run),
            WorkerReady(incarnation, self._weight_version),
        )
        try:
            await writer.append(*events)
        except FencedError:
            await self._host.kill(main)
            raise

    def _registered(self, engine: EngineProcess, role: str, run: str) -> WorkerRegistered:
        return WorkerRegistered(
            engine.incarnation,
            "main" if role == "main" else "shadow",
            engine.host,
            engine.pid,
            engine.pid_start_ticks,
            engine.address,
            run,
        )
