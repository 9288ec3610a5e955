"""How long recoveries took and what they cost, read from the journal after the run.

Phases of a failure, each from the kill on: detected (FailureDetected is in the journal), recovered (a new incarnation
is), resumed (the rollout's first event after that). Of a killed checkpointer: another has taken its sandbox over
(detected and resumed: what it had begun is not waited for any longer, nor is anything still frozen), and the next
checkpoint is published (recovered; the rollout does not wait for that, and a long action puts it off). Events are
stamped by the process that wrote them, all on one machine's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from belayer.demo.failures import Kind
from belayer.demo.strikes import Struck
from belayer.journal.codec import Recorded
from belayer.journal.events import (
    ActionCommitted,
    ActionStarted,
    CheckpointExtended,
    CheckpointPublished,
    EpochStarted,
    FailureDetected,
    GenerationFinished,
    GenerationResumed,
    GenerationStarted,
    SandboxRestored,
    TokensAppended,
    TrajectoryResumed,
    WorkerReady,
)
from belayer.projections.trajectory import Generation, TrajectoryState

_ROLLOUT = (GenerationStarted, GenerationResumed, TokensAppended, GenerationFinished, ActionStarted, ActionCommitted)


class Recovery(NamedTuple):
    """One failure's recovery; seconds since the kill, None where a phase does not apply or did not come."""

    kind: Kind
    where: str
    detected_s: float | None
    recovered_s: float | None
    resumed_s: float | None


class Cost(NamedTuple):
    """What a run did more than once."""

    tokens_again: int
    """Tokens generated on branches that were superseded."""
    actions_again: int
    """Actions run on branches that were superseded."""


def recovery_of(
    hit: Struck, trajectory: Sequence[Recorded], sandbox: Sequence[Recorded], worker: Sequence[Recorded]
) -> Recovery:
    """The recovery from one failure, given the three streams in order."""
    match hit.planned.kind:
        case Kind.REDIS:
            detected_ns, recovered_ns = None, hit.answered_ns
            resumed_ns = _first(trajectory, recovered_ns, _ROLLOUT)
        case Kind.ENGINE:
            detected_ns = _detected(worker, hit)
            recovered_ns = _first(worker, detected_ns, (WorkerReady,))
            resumed_ns = _first(trajectory, recovered_ns, (TokensAppended, GenerationFinished))
        case Kind.PUBLISH:
            detected_ns = resumed_ns = _taken_over(sandbox, hit)
            recovered_ns = _first(sandbox, hit.time_ns, (CheckpointPublished, CheckpointExtended))
        case Kind.IDLE | Kind.ACTION | Kind.CHECKPOINT | Kind.RECOVERY:
            detected_ns = _detected(sandbox, hit)
            recovered_ns = _first(sandbox, detected_ns, (SandboxRestored,))
            resumed_ns = _first(trajectory, _first(trajectory, recovered_ns, (TrajectoryResumed,)), _ROLLOUT)
    return Recovery(
        hit.planned.kind,
        hit.where,
        _since(hit, detected_ns),
        _since(hit, recovered_ns),
        _since(hit, resumed_ns),
    )


def cost_of(events: Iterable[Recorded], final: TrajectoryState) -> Cost:
    """What the run's superseded branches held."""
    tokens = actions = 0
    for recorded in events:
        match recorded.event:
            case TokensAppended():
                tokens += recorded.event.count
            case ActionStarted():
                actions += 1
            case _:
                pass
    live_tokens = sum(segment.count for segment in final.segments if isinstance(segment, Generation))
    return Cost(tokens - live_tokens, actions - sum(1 for _ in final.steps))


def _detected(events: Sequence[Recorded], hit: Struck) -> int | None:
    return next(
        (
            recorded.time_ns
            for recorded in events
            if isinstance(recorded.event, FailureDetected) and recorded.event.incarnation == hit.victim
        ),
        None,
    )


def _taken_over(events: Sequence[Recorded], hit: Struck) -> int | None:
    return next(
        (
            recorded.time_ns
            for recorded in events
            if recorded.time_ns >= hit.time_ns
            and isinstance(recorded.event, EpochStarted)
            and recorded.event.writer != hit.victim
        ),
        None,
    )


def _first(events: Sequence[Recorded], after_ns: int | None, kinds: tuple[type, ...]) -> int | None:
    if after_ns is None:
        return None
    return next(
        (recorded.time_ns for recorded in events if recorded.time_ns >= after_ns and isinstance(recorded.event, kinds)),
        None,
    )


def _since(hit: Struck, time_ns: int | None) -> float | None:
    return None if time_ns is None else max(0.0, (time_ns - hit.time_ns) / 1e9)
