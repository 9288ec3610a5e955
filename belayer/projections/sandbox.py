"""The sandbox's fold: which container serves the trajectory, which checkpoints may be restored, what is unfinished.

`evolve` is pure and total.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec.structs import replace

from belayer.journal.codec import Recorded
from belayer.journal.events import (
    AnyEvent,
    CheckpointDiscarded,
    CheckpointExtended,
    CheckpointPublished,
    CheckpointStarted,
    EpochStarted,
    FailureDetected,
    RecoveryStarted,
    SandboxCreated,
    SandboxRemoved,
    SandboxRestored,
    SandboxSpec,
)
from belayer.projections.trajectory import INITIAL, Boundary

_NAMES = 16
"""So many of those who have begun a recovery are kept."""

SandboxPhase = Literal["none", "live", "failed", "recovering", "removed"]


class SandboxState(msgspec.Struct, frozen=True):
    """`container` names the incarnation that counts; an incarnation that it does not name is nobody's."""

    phase: SandboxPhase = "none"
    container: SandboxCreated | SandboxRestored | None = None
    run: str = ""
    spec: SandboxSpec | None = None
    restored_from: Boundary = INITIAL
    """The boundary at which the current incarnation began."""
    published: dict[str, CheckpointPublished] = {}
    """Checkpoints that may be restored, oldest first."""
    held: tuple[tuple[str, Boundary], ...] = ()
    """Which boundary which of them holds, in the order in which the journal says so. One may hold several."""
    open_checkpoint: CheckpointStarted | None = None
    refused: int = 0
    """How many captures in a row have come to nothing."""
    failure: FailureDetected | None = None
    failures: int = 0
    repeats: int = 0
    """How often in a row the sandbox has gone back to the same boundary: an action that kills its container, likely."""
    epoch: int = 0
    sequence: int = 0
    writer: str = ""
    """Who began the epoch."""
    capture_epoch: int = 0
    """The epoch in which the newest checkpoint was begun."""
    recovery_epoch: int = 0
    """The epoch in which the newest recovery was begun."""
    recovered_by: tuple[str, ...] = ()
    """Who has begun to restore what is to be restored now, one after the other, each once."""
    abandoned_at: Boundary = INITIAL
    abandoned: int = 0
    """How many captures of that boundary in a row have been left open: their checkpointers died, likely of them."""

    @property
    def incarnation(self) -> str:
        return "" if self.container is None else self.container.incarnation


EMPTY = SandboxState()


def fold(history: Iterable[Recorded], state: SandboxState = EMPTY) -> SandboxState:
    """The state after `history`."""
    for recorded in history:
        state = evolve(state, recorded.sequence, recorded.event)
    return state


def evolve(state: SandboxState, sequence: int, event: AnyEvent) -> SandboxState:
    """The state after one more event."""
    match event:
        case SandboxCreated():
            return replace(
                state, sequence=sequence, phase="live", container=event, run=event.run, spec=event.spec, failure=None
            )
        case SandboxRestored():
            at = Boundary(event.boundary, event.boundary_sequence)
            return replace(
                state,
                sequence=sequence,
                phase="live",
                container=event,
                restored_from=at,
                failure=None,
                recovered_by=(),
                repeats=state.repeats + 1 if at == state.restored_from else 0,
            )
        case FailureDetected() if event.incarnation == state.incarnation and state.phase == "live":
            return replace(state, sequence=sequence, phase="failed", failure=event, failures=state.failures + 1)
        case RecoveryStarted() if state.phase in ("failed", "recovering"):
            by = (*(each for each in state.recovered_by if each != event.recovered_by), event.recovered_by)
            return replace(
                state, sequence=sequence, phase="recovering", recovery_epoch=state.epoch, recovered_by=by[-_NAMES:]
            )
        case CheckpointStarted():
            return replace(state, sequence=sequence, open_checkpoint=event, capture_epoch=state.epoch)
        case CheckpointPublished():
            return replace(
                state,
                sequence=sequence,
                published=state.published | {event.checkpoint: event},
                held=(*state.held, (event.checkpoint, Boundary(event.boundary, event.boundary_sequence))),
                open_checkpoint=_still_open(state, event.checkpoint),
                refused=0,
            )
        case CheckpointExtended():
            at = Boundary(event.boundary, event.boundary_sequence)
            held = (*state.held, (event.checkpoint, at)) if event.checkpoint in state.published else state.held
            left = _still_open(state, event.begun)
            return replace(state, sequence=sequence, held=held, open_checkpoint=left, refused=0)
        case CheckpointDiscarded():
            published = {name: kept for name, kept in state.published.items() if name != event.checkpoint}
            at, abandoned = _abandoned(state, event.checkpoint)
            return replace(
                state,
                sequence=sequence,
                published=published,
                held=tuple(pair for pair in state.held if pair[0] != event.checkpoint),
                open_checkpoint=_still_open(state, event.checkpoint),
                refused=state.refused + (event.checkpoint not in state.published),
                recovered_by=() if event.checkpoint in state.published else state.recovered_by,
                abandoned_at=at,
                abandoned=abandoned,
            )
        case SandboxRemoved():
            return replace(state, sequence=sequence, phase="removed", published={}, held=(), open_checkpoint=None)
        case EpochStarted():
            return replace(state, sequence=sequence, epoch=event.epoch, writer=event.writer)
        case _:
            return replace(state, sequence=sequence)


def _abandoned(state: SandboxState, discarded: str) -> tuple[Boundary, int]:
    """Counts a capture that is discarded in a later epoch than it was begun in."""
    started = state.open_checkpoint
    if started is None or started.checkpoint != discarded or state.capture_epoch == state.epoch:
        return state.abandoned_at, state.abandoned
    at = Boundary(started.boundary, started.boundary_sequence)
    return at, state.abandoned + 1 if at == state.abandoned_at else 1


def _still_open(state: SandboxState, settled: str) -> CheckpointStarted | None:
    started = state.open_checkpoint
    return None if started is None or started.checkpoint == settled else started
