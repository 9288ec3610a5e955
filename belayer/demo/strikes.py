"""Carries out a failure plan against a run: waits for each instant in the journal and kills the real process.

A strike counts only when the journal shows that it hit the phase it was meant for; one that came too late is tried
again at the next fitting instant. A kind that found no instant before the trajectory ended is reported as missed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from belayer.actors.names import pid_of
from belayer.actors.worker_recovery import look as look_worker
from belayer.demo.failures import Kind, Planned
from belayer.demo.stage import WORKER, Stage
from belayer.demo.view import View
from belayer.demo.waiting import RETRY_S
from belayer.errors import JournalUnavailableError
from belayer.processes import kill
from belayer.projections.plan import MAX_REPEATS, newest_checkpoint

_LEAST_TURNS = 3
"""How many turns a failure that was put off gets at least."""
_PHASE_S = 30.0
"""How long to wait for what must follow within a strike (a recovery to begin, say)."""


class Struck(NamedTuple):
    """A failure that hit. Times are wall-clock ns, comparable with the journal's."""

    planned: Planned
    time_ns: int
    victim: str
    """The incarnation or process that was killed."""
    where: str
    """The phase that it hit, for a person to read."""
    answered_ns: int = 0
    """When a restarted Redis answered again."""


@dataclass(slots=True)
class Striker:
    """Strikes one trajectory. `redis` keeps several strikers from restarting the server at once."""

    stage: Stage
    view: View
    redis: asyncio.Lock
    struck: list[Struck] = field(default_factory=list)
    missed: list[Planned] = field(default_factory=list)
    _give_up_at: int = sys.maxsize

    async def strike_all(self, plan: Sequence[Planned]) -> None:
        """Carry the plan out; returns when all have struck or the trajectory has ended.

        A failure that has found no instant when the next one's comes is put off behind the others.
        """
        waiting = deque(plan)
        while waiting and not self.view.ended:
            planned = waiting.popleft()
            next_number = waiting[0].number if waiting else sys.maxsize
            self._give_up_at = max(next_number, self.view.trajectory.generations + _LEAST_TURNS)
            hit = None
            while hit is None and not self._over(self.view):
                hit = await self._strike(planned)
                await asyncio.sleep(0 if hit else RETRY_S)
            if hit is None:
                waiting.append(planned)
            else:
                self.struck.append(hit)
                await self._recovered(hit.victim)
        self.missed.extend(waiting)

    def _over(self, view: View) -> bool:
        """Whether the failure at hand has had its time."""
        return view.ended or view.trajectory.generations >= self._give_up_at

    async def _until(self, there: Callable[[View], bool]) -> bool:
        """True as soon as the view is there; False when the failure at hand has had its time before."""
        await self.view.until(lambda view: self._over(view) or there(view))
        return there(self.view)

    async def _recovered(self, victim: str) -> None:
        """Wait until the rollout goes on in a container that is not the victim."""
        await self.view.until(
            lambda view: view.ended or (view.at_ease and view.sandbox.incarnation != victim), _PHASE_S
        )

    async def _strike(self, planned: Planned) -> Struck | None:
        if not await self._until(_may_fail):
            return None
        match planned.kind:
            case Kind.ENGINE:
                return await self._engine(planned)
            case Kind.IDLE:
                return await self._idle(planned)
            case Kind.ACTION:
                return await self._action(planned)
            case Kind.CHECKPOINT:
                return await self._checkpoint(planned)
            case Kind.RECOVERY:
                return await self._recovery(planned)
            case Kind.REDIS:
                return await self._redis(planned)
            case Kind.PUBLISH:
                return await self._publish(planned)

    async def _in_generation(self, planned: Planned, at_ease: bool = False) -> int:
        """Wait until the planned generation, or a later one, has enough tokens; its number, 0 when none came.

        With `at_ease` also until nothing else goes on: no checkpoint, no recovery.
        """

        def there(view: View) -> bool:
            current = view.trajectory.generation
            return (
                view.trajectory.phase == "open"
                and (view.at_ease or not at_ease)
                and current is not None
                and current.number >= planned.number
                and current.count >= (planned.tokens if current.number == planned.number else 1)
            )

        if not await self._until(there):
            return 0
        await asyncio.sleep(planned.delay_s)
        current = self.view.trajectory.generation
        return 0 if self.view.ended or current is None else current.number

    async def _engine(self, planned: Planned) -> Struck | None:
        generation = await self._in_generation(planned)
        try:
            worker = await look_worker(self.stage.store, WORKER)
        except JournalUnavailableError:
            return None
        current = self.view.trajectory.generation
        if not generation or current is None or worker.serving is None or worker.shadow is None:
            return None
        registered = worker.serving.registered
        if current.incarnation != registered.incarnation:
            return None
        now = time.time_ns()
        await kill(registered.pid, registered.pid_start_ticks)

        def settled(view: View) -> bool:
            current = view.trajectory.generation
            return current is None or current.number != generation or current.incarnation != registered.incarnation

        await self.view.until(settled, _PHASE_S)
        current = self.view.trajectory.generation
        if current is None or current.number != generation or current.incarnation == registered.incarnation:
            return None
        return Struck(planned, now, registered.incarnation, f"after {current.count} tokens of generation {generation}")

    async def _idle(self, planned: Planned) -> Struck | None:
        generation = await self._in_generation(planned, at_ease=True)
        if not generation or not self.view.at_ease:
            return None
        hit = await self._kill_container(planned, f"in generation {generation}")
        await self.view.until(lambda view: view.ended or view.trajectory.phase == "recovering", _PHASE_S)
        in_action = self.view.trajectory.action is not None and self.view.action_started_ns < hit.time_ns
        return None if in_action else hit

    async def _action(self, planned: Planned) -> Struck | None:
        def there(view: View) -> bool:
            action = view.trajectory.action
            return view.at_ease and action is not None and action.action >= planned.number

        if not await self._until(there):
            return None
        await asyncio.sleep(planned.delay_s)
        action, commits = self.view.trajectory.action, self.view.commits
        if action is None or self.view.ended:
            return None
        hit = await self._kill_container(planned, f"in action {action.action}")
        await self.view.until(lambda view: view.trajectory.action is not action, _PHASE_S)
        return hit if self.view.commits == commits else None

    async def _checkpoint(self, planned: Planned) -> Struck | None:
        def there(view: View) -> bool:
            started = view.sandbox.open_checkpoint
            return started is not None and started.boundary >= planned.number and view.sandbox.phase == "live"

        if not await self._until(there):
            return None
        started = self.view.sandbox.open_checkpoint
        if started is None:
            return None
        return await self._kill_container(planned, f"in checkpoint {started.checkpoint}")

    async def _publish(self, planned: Planned) -> Struck | None:
        actors = self.stage.actors

        def there(view: View) -> bool:
            started = view.sandbox.open_checkpoint
            return started is not None and started.boundary >= planned.number and view.sandbox.phase == "live"

        if not await self._until(there):
            return None
        started, by, now = self.view.sandbox.open_checkpoint, self.view.sandbox.writer, time.time_ns()
        if started is None or pid_of(by) not in actors.processes:
            return None
        await actors.kill(pid_of(by))
        await actors.start_one()
        open_checkpoint = self.view.sandbox.open_checkpoint
        if open_checkpoint is not started and started.checkpoint in self.view.sandbox.published:
            return None
        return Struck(planned, now, by, f"{by} in checkpoint {started.checkpoint}")

    async def _recovery(self, planned: Planned) -> Struck | None:
        generation = await self._in_generation(planned)
        if not generation or self.view.sandbox.phase != "live":
            return None
        hit = await self._kill_container(planned, f"in generation {generation}")
        actors = self.stage.actors

        def there(view: View) -> bool:
            return view.ended or (view.sandbox.phase == "recovering" and pid_of(view.recovered_by) in actors.processes)

        if not await self.view.until(there, _PHASE_S) or self.view.ended:
            return None
        first = self.view.recovered_by
        await asyncio.sleep(planned.delay_s)
        if pid_of(first) not in actors.processes:
            return None
        await actors.kill(pid_of(first))

        def settled(view: View) -> bool:
            return view.ended or view.sandbox.phase != "recovering" or view.recovered_by != first

        await asyncio.gather(actors.start_one(), self.view.until(settled, _PHASE_S))
        if self.view.recovered_by == first:  # it had restored the sandbox before it died
            return None
        return hit._replace(where=f"{hit.where}, then {first} in the recovery")

    async def _redis(self, planned: Planned) -> Struck | None:
        async with self.redis:
            if not (generation := await self._in_generation(planned)):
                return None
            now, pid = time.time_ns(), self.stage.server.pid
            await self.stage.server.kill()
            await self.stage.server.start()
            return Struck(planned, now, f"redis ({pid})", f"in generation {generation}", time.time_ns())

    async def _kill_container(self, planned: Planned, where: str) -> Struck:
        container = self.view.sandbox.container
        assert container is not None
        now = time.time_ns()
        await kill(container.pid, container.pid_start_ticks)
        return Struck(planned, now, container.incarnation, where)


def _may_fail(view: View) -> bool:
    """Whether another failure would not end the trajectory: strikes that miss must not add up to a sandbox that fails
    again and again from one boundary."""
    _, newest = newest_checkpoint(view.trajectory, view.sandbox)
    return view.sandbox.repeats < MAX_REPEATS // 2 or newest != view.sandbox.restored_from
