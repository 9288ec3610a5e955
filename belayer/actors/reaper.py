"""Removes what has no owner any more: containers and checkpoints of ended trajectories, containers that a dead
recovery left half made, and everything of a run whose owner is gone.

First the journal says 'removed', then it is removed: so a detector never takes a removal for a failure, and a reaper
that dies in between is followed by another that finds the thing still there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from belayer import ids
from belayer.actors.sandboxes import incarnation_epoch, is_checkpoint_of, look
from belayer.actors.worker_recovery import process_of
from belayer.errors import FencedError, JournalError, JournalUnavailableError, WrongSequenceError
from belayer.gpu.protocol import EngineHost
from belayer.ids import StreamId, StreamKind
from belayer.journal.events import RunFinished, SandboxRemoved, WorkerRemoved
from belayer.journal.store import JournalStore, Notice
from belayer.journal.writer import Reader, mark_of, take_over
from belayer.processes import wait_exit
from belayer.projections import run, sandbox, trajectory, worker
from belayer.sandbox.protocol import SandboxHost

log = structlog.get_logger("belayer.reaper")


class Reaper:
    """Tidies one host."""

    name = "reaper"
    tags = frozenset({"trajectory-finished", "trajectory-aborted", "sandbox-restored", "run-started", "run-finished"})
    concurrency = 10_000
    stale_after_s = 4.0

    def __init__(
        self, store: JournalStore, sandboxes: SandboxHost, engines: EngineHost, host_name: str, by: str
    ) -> None:
        self._store = store
        self._sandboxes = sandboxes
        self._engines = engines
        self._host_name = host_name
        self._by = by

    async def handle(self, notice: Notice) -> None:
        name = notice.stream.name
        match notice.stream.kind:
            case StreamKind.TRAJECTORY:
                await self._remove_ended(name)
            case StreamKind.SANDBOX:
                await self._remove_strays(name)
            case StreamKind.RUN:
                await self._guard_run(name)
            case StreamKind.WORKER:
                pass

    async def _remove_ended(self, name: str) -> None:
        history = await Reader(self._store, ids.trajectory(name), from_mark=True).catch_up()
        prefix = trajectory.fold(history)
        if mark_of(history) is not None:
            await self._remove_things(name, None)  # it says 'removed'; who said so may have died before he did it
        elif prefix.phase in ("finished", "aborted"):
            if (await look(self._store, name)).container is None:
                await self._remove_things(name, prefix.run)  # its rollout may have died before the journal knew of one
            else:
                await self._remove_sandbox(name, f"the trajectory is {prefix.phase}")

    async def _remove_sandbox(self, name: str, reason: str) -> None:
        state = await look(self._store, name)
        if state.container is None or state.container.host != self._host_name:
            return
        if state.phase != "removed":
            writer, history = await take_over(self._store, ids.sandbox(name), self._by)
            state = sandbox.fold(history)
            await writer.append(SandboxRemoved(state.incarnation, reason))
        await self._remove_things(name, state.run)

    async def _remove_things(self, name: str, run: str | None) -> None:
        """What this host has of the trajectory's sandbox; of that run, for another journal's may have the same name."""
        for incarnation in await self._incarnations(name, run):
            await self._sandboxes.remove(incarnation)
        for checkpoint in await self._sandboxes.checkpoints(run):
            if is_checkpoint_of(name, checkpoint):
                await self._sandboxes.remove_checkpoint(checkpoint)

    async def _remove_strays(self, name: str) -> None:
        """Containers of earlier epochs than the one that counts; a later one may be a recovery at work."""
        state = await look(self._store, name)
        if state.phase != "live" or state.container is None or state.container.host != self._host_name:
            return
        current = incarnation_epoch(name, state.incarnation)
        for incarnation in await self._incarnations(name, state.run):
            if incarnation != state.incarnation and incarnation_epoch(name, incarnation) < current:
                await self._sandboxes.remove(incarnation)

    async def _incarnations(self, name: str, run: str | None) -> list[str]:
        return [found for found in await self._sandboxes.incarnations(run) if incarnation_epoch(name, found) >= 0]

    async def _guard_run(self, name: str) -> None:
        """Wait for the run's end or its owner's, then remove what is left of it."""
        state = run.fold(await Reader(self._store, ids.run(name)).catch_up())
        if state.started is None or state.started.host != self._host_name:
            return
        if not state.finished:
            await wait_exit(state.started.owner_pid, state.started.owner_start_ticks)
        await self.remove_run(name)

    async def remove_run(self, name: str) -> None:
        """Remove every engine, container and checkpoint of the run here.

        JournalUnavailableError: the containers and checkpoints are removed, by their label; do it again for the rest.
        """
        try:
            await self._remove_journaled(name)
        except JournalUnavailableError as error:
            log.warning("the journal does not answer; removing by label", run=name, error=str(error))
            await self._sandboxes.remove_run(name)
            raise
        await self._sandboxes.remove_run(name)

    async def _remove_journaled(self, name: str) -> None:
        for stream in await self._store.streams(StreamKind.WORKER):
            await self._whoever_comes_between(stream, lambda stream: self._remove_engines(stream, name))
        for stream in await self._store.streams(StreamKind.SANDBOX):
            await self._whoever_comes_between(stream, lambda stream: self._remove_sandbox_of(stream, name))
        await self._whoever_comes_between(ids.run(name), self._say_finished)

    async def _whoever_comes_between(self, stream: StreamId, remove: Callable[[StreamId], Awaitable[None]]) -> None:
        """Do it, again when another writer was faster: a detector, say, who sees the run's engines end. A stream that
        cannot be read keeps nothing else from being removed."""
        while True:
            try:
                return await remove(stream)
            except (FencedError, WrongSequenceError):
                continue
            except JournalUnavailableError:
                raise
            except JournalError as error:
                return log.warning("a stream was passed over", stream=str(stream), error=str(error))

    async def _remove_engines(self, stream: StreamId, of_run: str) -> None:
        state = worker.fold(await Reader(self._store, stream).catch_up())
        for incarnation, engine in state.engines.items():
            here = engine.registered.host == self._host_name
            if state.run == of_run and here and engine.status != "removed":
                writer, _ = await take_over(self._store, stream, self._by)
                await writer.append(WorkerRemoved(incarnation, f"run {of_run} is over"))
                await self._engines.kill(process_of(engine))
        if state.run == of_run:
            for stray in await self._engines.strays(stream.name):
                await self._engines.kill(stray)

    async def _remove_sandbox_of(self, stream: StreamId, of_run: str) -> None:
        if (await look(self._store, stream.name)).run == of_run:
            await self._remove_sandbox(stream.name, f"run {of_run} is over")

    async def _say_finished(self, stream: StreamId) -> None:
        if not run.fold(await Reader(self._store, stream).catch_up()).finished:
            writer, _ = await take_over(self._store, stream, self._by)
            await writer.append(RunFinished("its owner is gone"))
