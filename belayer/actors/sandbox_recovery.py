"""Brings a failed sandbox back and the trajectory with it.

Steps, each safe to repeat: RecoveryStarted on the sandbox's stream (its epoch shuts out checkpointers and other
recoveries), RecoveryStarted on the trajectory's stream (its epoch shuts out the rollout), full_restore under a name
of this epoch, SandboxRestored, then Rewound and TrajectoryResumed in one append. A recovery that dies anywhere is
started again from the journal by whoever takes its notice over, and from an older checkpoint once RESTORE_DEATHS of
them have died at one; a container that no SandboxRestored names is removed by the reaper. What this machine lacks for
the moment (HostUnfitError) is no checkpoint's fault: the recovery is tried again later, for UNFIT_S.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from belayer import ids
from belayer.actors.actor import foreseen
from belayer.actors.names import is_surely_dead
from belayer.actors.patience import settled
from belayer.actors.sandboxes import incarnation_name, look
from belayer.errors import (
    FencedError,
    HostUnfitError,
    InputError,
    RestoreFailedError,
    SandboxFailedError,
    UnforeseenError,
)
from belayer.journal.events import (
    CheckpointDiscarded,
    LeftOut,
    RecoveryStarted,
    Rewound,
    SandboxRemoved,
    SandboxRestored,
    TrajectoryAborted,
    TrajectoryResumed,
)
from belayer.journal.store import JournalStore
from belayer.journal.writer import Reader, StreamWriter, take_over
from belayer.observe import steps
from belayer.observe.position import at, say
from belayer.projections import sandbox, trajectory
from belayer.projections.plan import GiveUp, LeaveAlone, Plan, RestoreSandbox, SandboxFailure, plan
from belayer.projections.sandbox import SandboxState
from belayer.projections.trajectory import Boundary, TrajectoryState
from belayer.sandbox.protocol import Incarnation, SandboxHost

INITIAL_TRIES = 3
"""How often the initial state, after which nothing older can be tried, is made before the trajectory is given up."""
RESTORE_DEATHS = 5
"""So many processes may die while they restore one state; the next one tries an older state."""
UNFIT_S = 3600.0
"""A machine that is unfit for longer (Docker down, disk full) fails a restore like any other cause."""
AT_ONCE = 8
"""Recoveries that a process does at the same time; others wait."""


class SandboxRecovery:
    """Recovers the sandboxes of one host."""

    def __init__(
        self,
        store: JournalStore,
        host: SandboxHost,
        host_name: str,
        by: str,
        patience_s: float = 0.0,
        unfit_s: float = UNFIT_S,
    ) -> None:
        """`patience_s`: how long a step of a recovery that another has begun may take before it is taken for dead.

        `unfit_s`: how long a machine that cannot restore anything is waited for.
        """
        self._store = store
        self._patience_s = patience_s
        self._host = host
        self._host_name = host_name
        self._by = by
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._at_work: set[str] = set()
        self._unfit_s = unfit_s
        self._unfit_since_s: dict[str, float] = {}

    async def recover(self, name: str) -> None:
        """Recover the trajectory's sandbox if it is failed and its container was here; otherwise do nothing."""

        def under_way(state: SandboxState) -> int | None:
            """The epoch of the recovery that somebody is at. One that we have left for a later try is not."""
            left = state.writer == self._by and name not in self._at_work
            return state.recovery_epoch if state.phase == "recovering" and not left else None

        state = await settled(
            self._store,
            ids.sandbox(name),
            lambda: look(self._store, name),
            under_way,
            self._host_name,
            self._patience_s,
        )
        if not self._ours(state) and not await self._half_resumed(name, state):
            return
        async with self._slots:
            self._at_work.add(name)
            try:
                await self._take(name, state)
            finally:
                self._at_work.discard(name)

    async def _take(self, name: str, state: SandboxState) -> None:
        writer, history = await take_over(self._store, ids.sandbox(name), self._by, only_at=state.sequence)
        state = sandbox.fold(history)
        if self._ours(state):
            with steps.step("recovery.sandbox", stream=str(writer.stream), epoch=writer.epoch):
                await self._recover(writer, name, state)
        elif state.phase == "live":
            await self._resume_only(writer, name, state)

    def _ours(self, state: SandboxState) -> bool:
        return (
            state.phase in ("failed", "recovering")
            and state.container is not None
            and state.container.host == self._host_name
        )

    async def _half_resumed(self, name: str, state: SandboxState) -> bool:
        """A recovery died between SandboxRestored and the trajectory's resumption."""
        if state.phase != "live" or state.container is None or state.container.host != self._host_name:
            return False
        prefix = trajectory.fold(await Reader(self._store, ids.trajectory(name), from_mark=True).catch_up())
        return prefix.phase == "recovering"

    async def _recover(self, writer: StreamWriter, name: str, state: SandboxState) -> None:
        failed = state.incarnation
        with steps.step("recovery.fence", stream=str(writer.stream), epoch=writer.epoch):
            await writer.append(RecoveryStarted(failed, "restore the sandbox", self._by))
            rollout, prefix, decision = await self._fence(writer, name, state)
        say("belayer.recovery", "recovering the sandbox", failed=failed, plan=_in_words(decision))
        attempt = anew = 0
        deaths = sum(is_surely_dead(by, self._host_name) for by in state.recovered_by)
        while isinstance(decision, RestoreSandbox):
            try:
                if deaths >= RESTORE_DEATHS:
                    anew, deaths = INITIAL_TRIES - 1, 0
                    raise RestoreFailedError(decision.checkpoint, f"{RESTORE_DEATHS} processes have died doing it")
                with steps.step("recovery.restore", stream=str(writer.stream), epoch=writer.epoch):
                    restored = await self._restore(writer, name, state, decision, attempt)
            except (RestoreFailedError, SandboxFailedError, HostUnfitError, InputError, UnforeseenError) as error:
                if isinstance(error, HostUnfitError) and self._may_pass(name):
                    raise
                attempt += 1
                if decision.checkpoint:
                    anew = 0
                    discarded = CheckpointDiscarded(decision.checkpoint, str(error))
                    state = sandbox.evolve(state, await writer.append(discarded), discarded)
                    await self._host.remove_checkpoint(decision.checkpoint)
                    decision = plan(prefix, state, SandboxFailure())
                elif (anew := anew + 1) == INITIAL_TRIES:
                    decision = GiveUp(f"its initial state could not be made {anew} times: {error}")
            else:
                if prefix.phase == "empty":  # nobody waits; its rollout begins as if nothing had been
                    break
                await self._resume(
                    rollout, decision.boundary, decision.rewind, restored.name, failed, decision.left_out
                )
                break
        self._unfit_since_s.pop(name, None)
        if isinstance(decision, GiveUp) and prefix.phase != "empty":
            await rollout.append(TrajectoryAborted(decision.reason))
        if not isinstance(decision, RestoreSandbox):
            await writer.append(SandboxRemoved(failed, _in_words(decision)))
        await self._host.remove(failed)

    def _may_pass(self, name: str) -> bool:
        """Whether this machine has been unfit to recover the sandbox for less than UNFIT_S."""
        now_s = time.monotonic()
        return now_s - self._unfit_since_s.setdefault(name, now_s) < self._unfit_s

    async def _fence(
        self, writer: StreamWriter, name: str, state: SandboxState
    ) -> tuple[StreamWriter, TrajectoryState, Plan]:
        """Take the trajectory, and say there what is under way: from then on a rollout that opens it waits.

        One that opened it just before is shut out again. Leaving that to another try would wait for this one to end.
        """
        while True:
            rollout, prefix = await self._take_trajectory(writer, name)
            decision = plan(prefix, state, SandboxFailure())
            try:
                if prefix.phase in ("open", "recovering"):
                    await rollout.append(RecoveryStarted(state.incarnation, _in_words(decision), self._by))
                return rollout, prefix, decision
            except FencedError:
                if (await look(self._store, name)).epoch != writer.epoch:
                    raise

    async def _take_trajectory(self, writer: StreamWriter, name: str) -> tuple[StreamWriter, TrajectoryState]:
        """FencedError when the sandbox is another recovery's by now: it may be done, and the trajectory far beyond.

        In this order: who takes the sandbox after that look takes the trajectory after it, too, and shuts us out.
        """
        rollout, history = await take_over(self._store, ids.trajectory(name), self._by)
        await writer.check_epoch()
        return rollout, trajectory.fold(history)

    async def _restore(
        self, writer: StreamWriter, name: str, state: SandboxState, decision: RestoreSandbox, attempt: int
    ) -> Incarnation:
        assert state.spec is not None
        new = incarnation_name(name, writer.epoch, attempt)
        started = time.monotonic()
        if decision.checkpoint:
            number = decision.boundary.number
            work = self._host.restore(state.run, name, new, state.spec, decision.checkpoint, number)
        else:
            work = self._host.create(state.run, name, new, state.spec)
        restored = await foreseen(f"restore {new}", work)
        event = SandboxRestored(
            decision.checkpoint,
            decision.boundary.number,
            decision.boundary.sequence,
            restored.name,
            restored.container_id,
            restored.image_digest,
            restored.host,
            restored.pid,
            restored.pid_start_ticks,
            time.monotonic() - started,
            decision.left_out,
        )
        try:
            await writer.append(event)
        except FencedError:
            await self._host.remove(new)
            raise
        return restored

    async def _resume_only(self, writer: StreamWriter, name: str, state: SandboxState) -> None:
        """Finish what a dead recovery had left to do: its container stands, the rollout is still shut out.

        One that the trajectory has been resumed in already has moved on with it: it is not rewound.
        """
        rollout, prefix = await self._take_trajectory(writer, name)
        if prefix.phase != "recovering":
            return
        left_out = state.container.left_out if isinstance(state.container, SandboxRestored) else ()
        to, rewind = state.restored_from, False
        if prefix.sandbox_incarnation == state.incarnation:
            to = prefix.boundary
        else:
            rewind = prefix.action is not None or to != prefix.boundary
        await self._resume(rollout, to, rewind, state.incarnation, "", left_out)

    async def _resume(
        self,
        rollout: StreamWriter,
        boundary: Boundary,
        rewind: bool,
        incarnation: str,
        failed: str,
        left_out: tuple[LeftOut, ...],
    ) -> None:
        resumed = TrajectoryResumed(boundary.number, boundary.sequence, incarnation, left_out)
        with steps.step("recovery.resume", stream=str(rollout.stream), epoch=rollout.epoch):
            if rewind:
                reason = f"sandbox {failed} failed" if failed else "its sandbox failed"
                await rollout.append(Rewound(boundary.number, boundary.sequence, reason), resumed)
            else:
                await rollout.append(resumed)
        at(rollout)
        fields = {"boundary": boundary.number, "incarnation": incarnation, "rewound": rewind}
        fields |= {"left_out": [msgspec.structs.asdict(one) for one in left_out]} if left_out else {}
        say("belayer.recovery", "resumed the trajectory", **fields)


def _in_words(decision: Plan) -> str:
    match decision:
        case RestoreSandbox():
            source = decision.checkpoint or "the initial state"
            without = f" without {len(decision.left_out)} left out of it" if decision.left_out else ""
            rewind = ", rewind" if decision.rewind else ""
            return f"restore {source} (boundary {decision.boundary.number}){without}{rewind}"
        case LeaveAlone() | GiveUp():
            return decision.reason
        case _:
            return type(decision).__name__
