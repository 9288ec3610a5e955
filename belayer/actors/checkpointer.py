"""Captures boundaries while the model thinks about what comes next.

Intent (CheckpointStarted), effect (full_checkpoint), outcome, all under one epoch of the sandbox's stream. The outcome
is CheckpointPublished, CheckpointExtended when nothing had changed since an earlier one, or CheckpointDiscarded. A
checkpointer that dies in between leaves an open intent: the next one waits a while for its outcome, then discards it
and removes its files. A boundary whose captures are left open again and again is not captured: they end their process,
by the memory that they take for example. One that was overtaken cannot publish, and removes what it made. Either way a
checkpoint that the journal does not call published is never restored.
"""

from __future__ import annotations

import time

import structlog

from belayer import ids
from belayer.actors.actor import foreseen
from belayer.actors.patience import settled
from belayer.actors.policy import UNKNOWN, Outlook, Policy, decide, history_of
from belayer.actors.projector import Projector
from belayer.actors.sandboxes import checkpoint_name, incarnation_of
from belayer.errors import FencedError, SandboxError, UnforeseenError
from belayer.journal.events import (
    ActionCommitted,
    CheckpointDiscarded,
    CheckpointExtended,
    CheckpointPublished,
    CheckpointStarted,
)
from belayer.journal.store import JournalStore, Notice
from belayer.journal.writer import StreamWriter, take_over
from belayer.observe import steps
from belayer.projections import sandbox, tempo, trajectory
from belayer.projections.plan import disposable, newest_checkpoint
from belayer.projections.sandbox import SandboxState
from belayer.projections.trajectory import Boundary, TrajectoryState
from belayer.sandbox.protocol import SandboxHost

log = structlog.get_logger("belayer.checkpointer")

KEPT_CHECKPOINTS = 2
"""The newest published one is what recovery restores; the one before is there should that restore fail."""


ABANDONED = 3
"""So many captures of one boundary in a row may end with their process."""
HOLD_AFTER = 2
"""So many captures in a row may come to nothing because the next action was faster; then it has to wait for one."""


class Checkpointer:
    """Captures every boundary, or those that the adaptive policy (`policy.py`) chooses."""

    name = "checkpointer"
    tags = frozenset({str(ActionCommitted.__struct_config__.tag)})
    concurrency = 4
    stale_after_s = 1.0

    def __init__(
        self,
        store: JournalStore,
        host: SandboxHost,
        host_name: str,
        by: str,
        patience_s: float = 0.0,
        policy: Policy = "every-boundary",
    ) -> None:
        """`patience_s`: how long a capture that another checkpointer has begun may take before it is taken for dead."""
        self._store = store
        self._patience_s = patience_s
        self._host = host
        self._host_name = host_name
        self._by = by
        self._policy = policy
        self._tempos = Projector(store, ids.trajectory, tempo.fold, tempo.EMPTY)
        self._histories = Projector(store, ids.sandbox, history_of, UNKNOWN)
        self._trajectories = Projector(store, ids.trajectory, trajectory.outline, trajectory.EMPTY)
        self._sandboxes = Projector(store, ids.sandbox, sandbox.fold, sandbox.EMPTY)
        self._at_work: dict[str, bool] = {}
        """Sandboxes that a notice of ours is about, and whether another one has come since we looked."""

    async def handle(self, notice: Notice) -> None:
        """Bring the sandbox's checkpoints up to the newest boundary, if the sandbox still stands at it.

        A notice that comes while an earlier one is worked on is left to that: the slots are for other sandboxes.
        """
        name = notice.stream.name
        if name in self._at_work:
            self._at_work[name] = True
            return
        self._at_work[name] = True
        try:
            while self._at_work[name]:
                self._at_work[name] = False
                await self._bring_up(name)
        finally:
            del self._at_work[name]

    async def _bring_up(self, name: str) -> None:
        container = (await self._sandboxes.look(name)).container
        if container is None or container.host != self._host_name:
            return
        state = await settled(
            self._store,
            ids.sandbox(name),
            lambda: self._sandboxes.look(name),
            self._under_way,
            self._host_name,
            self._patience_s,
        )
        if (
            state.phase != "live"
        ):  # taking it over would cost a recovery its work; what is open waits for the next boundary
            return
        prefix = await self._trajectories.look(name)
        if state.open_checkpoint is None and not await self._wanted(name, prefix, state):
            return
        writer, history = await take_over(self._store, ids.sandbox(name), self._by, only_at=state.sequence)
        state = sandbox.fold(history)
        if (left := state.open_checkpoint) is not None:
            discarded = CheckpointDiscarded(left.checkpoint, _why_abandoned(state, left))
            state = sandbox.evolve(state, await writer.append(discarded), discarded)
            await self._host.remove_checkpoint(left.checkpoint)
        prefix = await self._trajectories.look(name)
        if await self._wanted(name, prefix, state):
            with steps.step("checkpoint", stream=str(writer.stream), epoch=writer.epoch):
                await self._capture(writer, name, prefix, state)

    def _under_way(self, state: SandboxState) -> int | None:
        """The epoch of the capture that another one is at; what we have left open, nobody is at."""
        return None if state.open_checkpoint is None or state.writer == self._by else state.capture_epoch

    async def _wanted(self, name: str, prefix: TrajectoryState, state: SandboxState) -> bool:
        """Whether the boundary has no checkpoint and, as far as the journal knows, the sandbox still stands at it; and
        whether it is worth one."""
        described = {state.restored_from.sequence} if state.container is not None else set[int]()
        described |= {boundary.sequence for _, boundary in state.held}
        return (
            prefix.phase == "open"
            and prefix.action is None
            and state.phase == "live"
            and prefix.boundary.sequence not in described
            and not (state.abandoned >= ABANDONED and state.abandoned_at == prefix.boundary)
            and (self._policy == "every-boundary" or await self._is_worth_it(name, prefix, state))
        )

    async def _is_worth_it(self, name: str, prefix: TrajectoryState, state: SandboxState) -> bool:
        pace = await self._tempos.look(name)
        _, saved = newest_checkpoint(prefix, state)
        outlook = Outlook(
            pace.work_since_s(prefix.boundary.sequence, saved.sequence),
            prefix.boundary.number - saved.number,
            pace.recent_generations_s,
            time.time(),
        )
        return decide(outlook, await self._histories.look(name))

    async def _capture(self, writer: StreamWriter, name: str, prefix: TrajectoryState, state: SandboxState) -> None:
        assert state.container is not None
        boundary = prefix.boundary
        checkpoint = checkpoint_name(name, boundary.number, writer.epoch)
        incarnation = incarnation_of(state.container)
        await writer.append(CheckpointStarted(checkpoint, incarnation.name, boundary.number, boundary.sequence))
        try:
            since, hold = _describing(state), state.refused >= HOLD_AFTER
            work = self._host.checkpoint(incarnation, checkpoint, boundary.number, since, hold)
            report = await foreseen(f"checkpoint {checkpoint}", work)
        except (SandboxError, UnforeseenError) as error:  # tried again at the next boundary, not at this one
            await self._discard(writer, checkpoint, str(error))
            return
        if report.held_by:
            at = incarnation.name, boundary.number, boundary.sequence
            await writer.append(CheckpointExtended(report.held_by, checkpoint, *at, report.frozen_s, report.total_s))
            return
        published = CheckpointPublished(
            checkpoint,
            incarnation.name,
            boundary.number,
            boundary.sequence,
            report.size_bytes,
            report.frozen_s,
            report.total_s,
            report.stored_bytes,
            report.not_captured,
            report.left_out,
        )
        try:
            await writer.append(published)
        except FencedError:
            await self._host.remove_checkpoint(checkpoint)
            raise
        steps.count("checkpoint.captured_bytes", report.size_bytes)
        steps.count("checkpoint.stored_bytes", report.stored_bytes)
        for old in disposable(prefix, sandbox.evolve(state, writer.sequence, published), KEPT_CHECKPOINTS):
            await self._discard(writer, old, "newer ones are published")

    async def _discard(self, writer: StreamWriter, checkpoint: str, reason: str) -> None:
        """First in the journal, then on disk: what the journal calls published is always there."""
        await writer.append(CheckpointDiscarded(checkpoint, reason))
        await self._host.remove_checkpoint(checkpoint)


def _why_abandoned(state: SandboxState, left: CheckpointStarted) -> str:
    at = Boundary(left.boundary, left.boundary_sequence)
    if state.abandoned + 1 >= ABANDONED and state.abandoned_at == at:
        return f"its checkpointer died, the last of {ABANDONED}: boundary {at.number} is not captured"
    return "its checkpointer died"


def _describing(state: SandboxState) -> str:
    """The newest checkpoint of the container that counts, or the one that it came from; empty when there is none."""
    for name, boundary in reversed(state.held):
        if state.published[name].incarnation == state.incarnation or boundary == state.restored_from:
            return name
    return ""
