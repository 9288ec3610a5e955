"""Judges a sandbox's stream: which container counts, what is captured, what may be restored.

The rules are those by which the checkpointer and the recovery write; `evolve` of the sandbox's projection gives the
state that they are judged in. What a boundary is worth, only the trajectory knows: that is for `replay.pairs`.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from belayer.journal.events import (
    AnyEvent,
    CheckpointDiscarded,
    CheckpointExtended,
    CheckpointPublished,
    CheckpointStarted,
    CommonEvent,
    EpochStarted,
    FailureDetected,
    RecoveryStarted,
    SandboxCreated,
    SandboxEvent,
    SandboxRemoved,
    SandboxRestored,
    StreamArchived,
)
from belayer.projections.sandbox import EMPTY, SandboxState, evolve
from belayer.projections.trajectory import INITIAL, Boundary
from replay.facts import Capture, Container, SandboxFacts, names
from replay.findings import Check, Findings

Objection = tuple[Check, str]


class SandboxAudit:
    """Takes the events of one sandbox's stream in."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._state = EMPTY
        self._containers: list[Container] = []
        self._captures: list[Capture] = []
        self._recovery_at = 0

    def step(self, sequence: int, event: AnyEvent, judge: bool) -> None:
        """Take one event in; without `judge` only the facts for other streams are kept."""
        objection = problem_of(self._state, event)
        if objection is not None and judge:
            self._findings.add(sequence, *objection)
        self._note(sequence, event, objection is None)
        if objection is not None and isinstance(event, RecoveryStarted):
            self._state = replace(self._state, phase="failed")
        self._state = evolve(self._state, sequence, event)
        self._recovery_at = (self._recovery_at or sequence) if self._state.phase == "recovering" else 0

    def facts(self, whole: bool) -> SandboxFacts:
        """What other streams' checks need, once the stream has ended."""
        return SandboxFacts(
            run=self._state.run,
            containers=self._containers,
            captures=self._captures,
            whole=whole,
            removed=self._state.phase == "removed",
            recovery_at=self._recovery_at,
        )

    def _note(self, sequence: int, event: AnyEvent, sound: bool) -> None:
        """Keep what `replay.pairs` compares; of an event that is wrong by itself nothing more is to be said."""
        match event:
            case SandboxCreated():
                self._containers.append(Container(sequence, event.incarnation, INITIAL, (), unproven=False))
            case SandboxRestored():
                at = Boundary(event.boundary, event.boundary_sequence)
                self._containers.append(Container(sequence, event.incarnation, at, event.left_out, sound))
            case CheckpointStarted() if sound:
                at = Boundary(event.boundary, event.boundary_sequence)
                self._captures.append(Capture(sequence, event.checkpoint, event.incarnation, at))
            case _:
                pass


def problem_of(state: SandboxState, event: AnyEvent) -> Objection | None:
    """Why `event` may not come next in a sandbox's stream; None when it may. Pure and total."""
    if not isinstance(event, SandboxEvent | CommonEvent):
        return Check.FOREIGN, f"{event.__struct_config__.tag} does not belong in a sandbox's stream"
    if isinstance(event, EpochStarted | SandboxRemoved | StreamArchived):
        return None
    if state.phase == "removed":
        return Check.LIFECYCLE, f"{event.__struct_config__.tag} after the sandbox was removed"
    if state.phase == "none" and not isinstance(event, SandboxCreated):
        return Check.LIFECYCLE, f"{event.__struct_config__.tag} before the sandbox was created"
    match event:
        case SandboxCreated():
            return None if state.phase == "none" else (Check.LIFECYCLE, "created although there is one")
        case CheckpointStarted():
            return _start_problem(state, event)
        case CheckpointPublished():
            return _publish_problem(state, event)
        case CheckpointExtended():
            return _extend_problem(state, event)
        case CheckpointDiscarded():
            return None
        case SandboxRestored():
            return _restore_problem(state, event)
        case FailureDetected():
            current = event.incarnation == state.incarnation
            return None if current else (Check.RECOVERY, f"{event.incarnation} failed, but {_now(state)}")
        case RecoveryStarted():
            failed = state.phase in ("failed", "recovering") and event.failed_incarnation == state.incarnation
            return None if failed else (Check.RECOVERY, f"a recovery of {event.failed_incarnation}, but {_now(state)}")
        case _:
            assert_never(event)


def _start_problem(state: SandboxState, event: CheckpointStarted) -> Objection | None:
    if state.phase != "live" or event.incarnation != state.incarnation:
        return Check.CHECKPOINT, f"checkpoint {event.checkpoint} of {event.incarnation}, but {_now(state)}"
    if (started := state.open_checkpoint) is not None:
        return Check.CHECKPOINT, f"checkpoint {started.checkpoint} was neither published nor discarded before this one"
    if event.checkpoint in state.published:
        return Check.CHECKPOINT, f"checkpoint {event.checkpoint} is published already"
    return None


def _publish_problem(state: SandboxState, event: CheckpointPublished) -> Objection | None:
    started = state.open_checkpoint
    if started is None or started.checkpoint != event.checkpoint:
        return Check.CHECKPOINT, f"checkpoint {event.checkpoint} is published, but was not started"
    meant, found = _place(started), _place(event)
    if meant != found:
        return Check.CHECKPOINT, f"checkpoint {event.checkpoint} was started as {meant} and published as {found}"
    return None


def _extend_problem(state: SandboxState, event: CheckpointExtended) -> Objection | None:
    started, what = state.open_checkpoint, f"checkpoint {event.checkpoint} is extended"
    if started is None or started.checkpoint != event.begun:
        return Check.CHECKPOINT, f"{what} in place of {event.begun}, which was not started"
    meant, found = _place(started), _place(event)
    if meant != found:
        return Check.CHECKPOINT, f"{what} to {found}, but {event.begun} was started as {meant}"
    held = [boundary for name, boundary in state.held if name == event.checkpoint]
    if not held:
        return Check.CHECKPOINT, f"{what}, but was not published, or was discarded"
    # The container that it describes came from it, or it from the container.
    ours = state.published[event.checkpoint].incarnation == event.incarnation or state.restored_from in held
    if not ours or max(held).number >= event.boundary:
        return Check.CHECKPOINT, f"{what} to boundary {event.boundary} of {event.incarnation}, which does not follow it"
    return None


def _restore_problem(state: SandboxState, event: SandboxRestored) -> Objection | None:
    if state.phase != "recovering":
        return Check.RECOVERY, f"restored without a recovery: {_now(state)}"
    at = Boundary(event.boundary, event.boundary_sequence)
    held = [boundary for name, boundary in state.held if name == event.checkpoint] if event.checkpoint else [INITIAL]
    if not held:
        return Check.RESTORE, f"checkpoint {event.checkpoint} was not published, or was discarded, when it was restored"
    if at in held:
        lacks = state.published[event.checkpoint].left_out if event.checkpoint else ()
        if event.left_out == lacks:
            return None
        return Check.RESTORE, f"checkpoint {event.checkpoint} lacks {names(lacks)}, the restore {names(event.left_out)}"
    there = " and ".join(str(tuple(boundary)) for boundary in held)
    return Check.RESTORE, f"{event.checkpoint or 'the initial state'} holds boundary {there}, not {tuple(at)}"


def _place(event: CheckpointStarted | CheckpointPublished | CheckpointExtended) -> tuple[str, int, int]:
    """Whose checkpoint it is, and of which boundary."""
    return event.incarnation, event.boundary, event.boundary_sequence


def _now(state: SandboxState) -> str:
    return f"the sandbox is {state.phase}" + (f" as {state.incarnation}" if state.incarnation else "")
