"""What to do about a failure: a pure and total function of what the journal says.

Promises, each a property in tests/projections/test_plan.py:
- an engine's death loses no journaled token and never touches the sandbox;
- a sandbox goes back to the newest published checkpoint on the live branch, never past it, never to a superseded one;
- context and environment agree after every plan: the rewind's boundary is the restored one. What a checkpoint of files
  alone lacks of it is in the plan, and such a checkpoint counts as any other (decision 15);
- tokens generated after the restored boundary are kept when no action ran after it: they fit that environment;
- a trajectory that has ended is left alone, one that has not begun gets its container back as it was;
- one whose sandbox fails again and again from one boundary is given up.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from belayer.journal.events import LeftOut
from belayer.projections.sandbox import SandboxState
from belayer.projections.trajectory import INITIAL, Boundary, TrajectoryState

WeightPolicy = Literal["resume", "regenerate"]
"""What to do with an unfinished generation when only newer weights can continue it."""


class EngineFailure(msgspec.Struct, frozen=True):
    """The engine that was generating is gone; another serves `weight_version`."""

    weight_version: int
    policy: WeightPolicy = "resume"


class SandboxFailure(msgspec.Struct, frozen=True):
    """The container is gone or cannot be trusted (an action's outcome in it is unknown)."""


Failure = EngineFailure | SandboxFailure


class LeaveAlone(msgspec.Struct, frozen=True):
    """Nothing is to be done."""

    reason: str


class ResumeGeneration(msgspec.Struct, frozen=True):
    """Give the whole live context to another engine: it goes on after `offset` tokens of the generation."""

    generation: int
    offset: int


class Regenerate(msgspec.Struct, frozen=True):
    """Rewind to the boundary, whose environment still stands, and generate again from there."""

    boundary: Boundary


class RestoreSandbox(msgspec.Struct, frozen=True):
    """Restore the checkpoint ('' is the initial state) of `boundary`; if `rewind`, generate again from there."""

    checkpoint: str
    boundary: Boundary
    rewind: bool
    left_out: tuple[LeftOut, ...] = ()
    """What of the boundary the checkpoint does not hold: its journal says so before the trajectory goes on."""


class GiveUp(msgspec.Struct, frozen=True):
    """Abort the trajectory: recovering once more would only fail once more."""

    reason: str


Plan = LeaveAlone | ResumeGeneration | Regenerate | RestoreSandbox | GiveUp

MAX_REPEATS = 5
"""How often a sandbox may go back to the same boundary before its trajectory is given up."""


def plan(trajectory: TrajectoryState, sandbox: SandboxState, failure: Failure) -> Plan:
    """The way back to a consistent prefix."""
    if trajectory.phase in ("finished", "aborted"):
        return LeaveAlone(f"the trajectory is {trajectory.phase}")
    match failure:
        case EngineFailure():
            return _engine_plan(trajectory, failure)
        case SandboxFailure():
            if sandbox.repeats >= MAX_REPEATS:
                times, number = sandbox.repeats + 1, sandbox.restored_from.number
                return GiveUp(f"its sandbox failed {times} times in a row after boundary {number}")
            checkpoint, boundary = newest_checkpoint(trajectory, sandbox)
            overtaken = trajectory.action is not None or boundary != trajectory.boundary
            left_out = sandbox.published[checkpoint].left_out if checkpoint else ()
            return RestoreSandbox(checkpoint, boundary, overtaken, left_out)


def newest_checkpoint(trajectory: TrajectoryState, sandbox: SandboxState) -> tuple[str, Boundary]:
    """The published checkpoint whose boundary is the newest on the live branch; ('', initial) when there is none.

    Boundaries of superseded branches have other sequences than live ones, so membership alone tells them apart.
    """
    live = set(trajectory.boundaries)
    found = ("", INITIAL)
    for name, boundary in sandbox.held:
        if boundary in live and boundary.sequence >= found[1].sequence:
            found = (name, boundary)
    return found


def disposable(trajectory: TrajectoryState, sandbox: SandboxState, keep: int) -> list[str]:
    """Published checkpoints that recovery will not need: all but the `keep` newest on the live branch."""
    live = set(trajectory.boundaries)
    usable = sorted((pair for pair in sandbox.held if pair[1] in live), key=lambda pair: pair[1].sequence)
    kept = list(dict.fromkeys(name for name, _ in reversed(usable)))[:keep]
    return [name for name in sandbox.published if name not in kept]


def _engine_plan(trajectory: TrajectoryState, failure: EngineFailure) -> Plan:
    generation = trajectory.generation
    if generation is None:
        return LeaveAlone("no generation is in flight")
    written_by = {chunk.weight_version for chunk in generation.chunks}
    if failure.policy == "resume" or written_by <= {failure.weight_version}:
        return ResumeGeneration(generation.number, generation.count)
    return Regenerate(trajectory.boundary)
