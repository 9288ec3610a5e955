"""Starts a worker's engines, replaces the main when it fails, and keeps a shadow armed.

Handover: RecoveryStarted, promote the shadow (which proves that the old main can do no harm), HandoverCompleted and
WorkerReady in one append. Without a shadow a new main is started instead. Arming another shadow is work of its own,
begun by the notice of the handover, so that nobody waits for it. A main whose memory server is gone serves on without
a shadow and is replaced, memory server and all, as soon as it is idle, or after `drain_s`; until then the journal calls
it draining, so that new requests go to other workers. A main that dies again soon after it was replaced is taken for a
sign of a failing GPU: its worker is excluded, and its requests go to other workers; so is one for which no main can be
started. An engine that no event names, for its starter died too soon, is ended by whoever starts the next one, and by
the reaper. An engine is called ready with the version of the
weights that it has: the memory server's word, and where there is none the old main's version for a shadow, 0 for an
engine started anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable

import structlog

from belayer import ids
from belayer.actors.patience import settled
from belayer.errors import EngineFailedError, FencedError, UnguardedMainError
from belayer.gpu.errors import DeviceUnhealthyError
from belayer.gpu.protocol import EngineHost, EngineProcess, Handover
from belayer.journal.codec import Recorded
from belayer.journal.events import (
    AnyEvent,
    FailureDetected,
    HandoverCompleted,
    RecoveryStarted,
    WorkerDraining,
    WorkerReady,
    WorkerRegistered,
    WorkerRemoved,
)
from belayer.journal.store import JournalStore
from belayer.journal.writer import Reader, StreamWriter, take_over
from belayer.observe import steps
from belayer.projections.worker import EMPTY, EngineState, WorkerState, evolve, fold

log = structlog.get_logger("belayer.recovery")

DRAIN_S = 600.0
"""How long a main whose memory server is gone may go on with the requests that it has."""
START_TRIES = 3
"""How often a main is started anew, when no shadow can take over, before its worker is excluded."""
_ASK_S = 5.0


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
        patience_s: float = 0.0,
        relapse_s: float = 0.0,
        drain_s: float = DRAIN_S,
    ) -> None:
        """`patience_s`: how long a step of a recovery that another has begun may take before it is taken for dead.

        `relapse_s`: a second death of a main within that time excludes the worker; 0 never does. `drain_s`: how long
        a main that no shadow can take over may go on with the requests that it has.
        """
        self._store = store
        self._patience_s = patience_s
        self._host = host
        self._host_name = host_name
        self._by = by
        self._relapse_s = relapse_s
        self._drain_s = drain_s
        self._arming: set[str] = set()
        self._replacing: set[str] = set()

    async def start(self, name: str, run: str) -> WorkerState:
        """Start the worker's first main engine. A worker that has one is left as it is."""
        writer, history = await take_over(self._store, ids.worker(name), self._by)
        if not fold(history).main:
            await self._start_main(writer, name, run)
        return await look(self._store, name)

    async def recover(self, name: str) -> None:
        """Replace the main if it has failed, and arm a shadow if there is none; what is in order is left alone."""

        def under_way(state: WorkerState) -> int | None:
            """The epoch of the recovery that somebody is at. One that we have left for a later try is not."""
            left = state.writer == self._by and name not in self._replacing
            return state.recovery_epoch if state.recovering and not left else None

        state = await settled(
            self._store,
            ids.worker(name),
            lambda: look(self._store, name),
            under_way,
            self._host_name,
            self._patience_s,
        )
        if not self._here(state):
            return
        if state.excluded:
            return await self._clear(name)
        if state.serving is None:
            with steps.step("recovery.worker", stream=str(ids.worker(name)), sequence=state.sequence):
                await self._replace_main(name, state.sequence)
            state = await look(self._store, name)
        if state.serving is not None and state.shadow is None and name not in self._arming:
            self._arming.add(name)
            try:
                await self._arm(name)
            except UnguardedMainError as error:
                await self._renew(name, error.evidence)
            finally:
                self._arming.discard(name)

    def _here(self, state: WorkerState) -> bool:
        main = state.engines.get(state.main)
        return main is not None and main.status != "removed" and main.registered.host == self._host_name

    async def _replace_main(self, name: str, seen: int) -> None:
        self._replacing.add(name)
        try:
            await self._replace(name, seen)
        finally:
            self._replacing.discard(name)

    async def _replace(self, name: str, seen: int) -> None:
        started_s = time.monotonic()
        writer, history = await take_over(self._store, ids.worker(name), self._by, only_at=seen)
        state = fold(history)
        if state.serving is not None or state.excluded or not self._here(state):
            return
        if relapse := _relapse(history, self._relapse_s):
            await writer.append(FailureDetected(state.main, "gpu", relapse, self._by))
            return await self._clear(name)
        old = process_of(state.engines[state.main])
        plan = "hand over to the shadow" if state.shadow else "start anew"
        await writer.append(RecoveryStarted(state.main, plan, self._by))
        fenced_s = time.monotonic()
        try:
            if (shadow := state.shadow) is not None:
                new = shadow.registered.incarnation
                try:
                    handover = await self._host.promote(process_of(shadow), old)
                except EngineFailedError as error:
                    await writer.append(FailureDetected(new, "unreachable", error.evidence, self._by))
                    await self._host.kill(process_of(shadow))
                else:
                    completed = _completed(state.main, new, started_s, fenced_s, handover)
                    version = handover.weight_version
                    if version is None:
                        version = state.engines[state.main].weight_version
                    await writer.append(completed, WorkerReady(new, version))
                    for phase, took_s in completed.phases_s.items():
                        steps.took(f"handover.{phase}", took_s, stream=str(writer.stream), epoch=writer.epoch)
                    return await self._host.kill(old)
            await self._host.kill(old)
            await self._start_main(writer, name, state.run)
        except DeviceUnhealthyError as error:
            await writer.append(FailureDetected(state.main, "gpu", error.evidence, self._by))
            await self._clear(name)
        except EngineFailedError as error:
            await writer.append(FailureDetected(state.main, "died", f"its successor {error.evidence}", self._by))
            if state.failed_starts + 1 >= START_TRIES:
                why = f"no main could be started, {START_TRIES} times in a row: {error.evidence}"
                await writer.append(FailureDetected(state.main, "gpu", why, self._by))
                await self._clear(name)

    async def _clear(self, name: str) -> None:
        """End all engines of an excluded worker, the main last: while it is there, another actor finishes this.

        Each is called removed before it is killed, so that nobody reports it.
        """
        writer, history = await take_over(self._store, ids.worker(name), self._by)
        state = fold(history)
        for incarnation, engine in sorted(state.engines.items(), key=lambda item: item[0] == state.main):
            if engine.status != "removed" and engine.registered.host == self._host_name:
                await writer.append(WorkerRemoved(incarnation, f"its worker is excluded: {state.excluded}"))
                await self._host.kill(process_of(engine))

    async def _renew(self, name: str, why: str) -> None:
        """Replace a main that no shadow can take over: once it is idle or `drain_s` is over. It serves until then.

        Requests that it has at the end of that time go on as after any failure, on the new main or another worker.
        """
        state = await look(self._store, name)
        if (serving := state.serving) is None:
            return
        if not serving.draining:
            writer, _ = await take_over(self._store, ids.worker(name), self._by, only_at=state.sequence)
            await writer.append(WorkerDraining(state.main, why))
        idle = await self._host.until_idle(process_of(serving), self._drain_s)
        when = "while idle" if idle else f"after {self._drain_s:.0f} s, not idle"
        now = await look(self._store, name)
        if now.serving is None or now.main != state.main:
            return
        writer, history = await take_over(self._store, ids.worker(name), self._by, only_at=now.sequence)
        await writer.append(FailureDetected(state.main, "unreachable", f"{why}; replaced {when}", self._by))
        await self._replace_main(name, history[-1].sequence + 1)

    async def _arm(self, name: str) -> None:
        """Start a shadow, then register it: the slow part holds no epoch that a handover would wait for."""
        await self._end_strays(name)
        state = await look(self._store, name)
        incarnation = f"{name}-{ids.new_suffix()}"
        shadow = await self._host.start(incarnation, "shadow")
        try:
            writer, history = await take_over(self._store, ids.worker(name), self._by)
            now = fold(history)
            unwanted = now.shadow is not None or now.excluded or not self._here(now)
            if unwanted or (now.main != state.main and now.serving is None):
                await self._host.kill(shadow)
                return
            version = now.engines[now.main].weight_version
            await writer.append(self._registered(shadow, "shadow", state.run), WorkerReady(incarnation, version))
        except FencedError:
            await self._host.kill(shadow)
            raise

    async def _end_strays(self, name: str) -> None:
        """End the engines that dead actors have started for the worker, and that no event names."""
        if found := await self._host.strays(name):
            known = (await look(self._store, name)).engines
            for engine in found:
                if engine.incarnation not in known:
                    log.info("ending an engine whose starter died", engine=engine.incarnation, pid=engine.pid)
                    await self._host.kill(engine)

    async def _start_main(self, writer: StreamWriter, name: str, run: str) -> None:
        await self._end_strays(name)
        incarnation = f"{name}-e{writer.epoch}"
        main = await self._host.start(incarnation, "main")
        events: tuple[AnyEvent, ...] = (
            self._registered(main, "main", run),
            WorkerReady(incarnation, await self._weight_version()),
        )
        try:
            await writer.append(*events)
        except FencedError:
            await self._host.kill(main)
            raise

    async def _weight_version(self) -> int:
        """That of a main which has just been started."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ASK_S), contextlib.aclosing(self._host.weight_versions()) as versions:
                async for version in versions:
                    return version
        return 0

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


def _completed(old: str, new: str, started_s: float, fenced_s: float, handover: Handover) -> HandoverCompleted:
    """The event, with its phases: what the host did not measure itself is the new main's way into service."""
    total_s = time.monotonic() - started_s
    phases_s = {"fence": fenced_s - started_s, **handover.phases_s}
    phases_s["serve"] = max(0.0, total_s - sum(phases_s.values()))
    rounded = {name: round(took_s, 6) for name, took_s in phases_s.items()}
    return HandoverCompleted(old, new, total_s, rounded, handover.adopted_tokens)


def _relapse(history: Iterable[Recorded], within_s: float) -> str:
    """Why the last two deaths of a main are taken for the GPU's fault; empty when they are not."""
    deaths_ns: list[int] = []
    state = EMPTY
    for recorded in history:
        event = recorded.event
        if isinstance(event, FailureDetected) and event.incarnation == state.main and _is_death(state, event):
            deaths_ns.append(recorded.time_ns)
        state = evolve(state, recorded.sequence, event)
    if len(deaths_ns) < 2 or not 0 <= deaths_ns[-1] - deaths_ns[-2] <= within_s * 1e9:
        return ""  # a clock that was set back in between tells nothing
    return f"a second main died within {(deaths_ns[-1] - deaths_ns[-2]) / 1e9:.1f} s (limit {within_s:.0f} s)"


def _is_death(state: WorkerState, failed: FailureDetected) -> bool:
    """Whoever sees it first says it: a gateway on another host calls a dead engine unreachable, as we one to renew.

    What is said of a dead one again is about its successor.
    """
    if state.engines[failed.incarnation].status == "failed":
        return False
    renewed = failed.kind == "unreachable" and state.engines[failed.incarnation].draining != ""
    return failed.kind in ("died", "hung", "unreachable") and not renewed
