"""What may follow what in a trajectory. One place for the writer, who refuses, and for the audit, which reports.

`problem_of` is pure and total: the objection to the event in this state, in words, or None.
"""

from __future__ import annotations

from belayer.journal.columns import LOGPROB_BYTES, TOKEN_ID_BYTES
from belayer.journal.events import (
    ActionCommitted,
    ActionStarted,
    AnyEvent,
    EpochStarted,
    FailureDetected,
    GenerationFinished,
    GenerationResumed,
    GenerationStarted,
    RecoveryStarted,
    Rewound,
    Sealed,
    StreamArchived,
    TokensAppended,
    TrajectoryAborted,
    TrajectoryFinished,
    TrajectoryResumed,
    TrajectoryStarted,
    readable,
    tag_of,
)
from belayer.projections.trajectory import Boundary, TrajectoryState


def problem_of(state: TrajectoryState, event: AnyEvent) -> str | None:
    """Why `event` may not come next in a trajectory's stream; None when it may. Sealed columns are not measured."""
    return _problem_of(state, readable(event), isinstance(event, Sealed))


def _problem_of(state: TrajectoryState, event: AnyEvent, sealed: bool) -> str | None:
    match event:
        case EpochStarted():
            expected = state.epoch + 1
            return None if event.epoch == expected else f"epoch {event.epoch} started; expected {expected}"
        case TrajectoryStarted():
            return None if state.phase == "empty" else f"a trajectory that is {state.phase} cannot start"
        case StreamArchived():
            return None
        case TrajectoryAborted() | RecoveryStarted() if state.phase in ("open", "recovering"):
            return None
        case Rewound() if state.phase in ("open", "recovering"):
            return _rewind_problem(state, event)
        case TrajectoryResumed() if state.phase == "recovering":
            return _resume_problem(state, event)
        case _:
            pass
    if state.phase != "open":
        return f"{tag_of(event)} in a trajectory that is {state.phase}"
    match event:
        case GenerationStarted() | GenerationResumed() | TokensAppended() | GenerationFinished():
            return _generation_problem(state, event, sealed)
        case ActionStarted() | ActionCommitted():
            return _action_problem(state, event)
        case TrajectoryFinished():
            return _unfinished(state)
        case TrajectoryResumed():
            return "resumed, but no recovery was started"
        case FailureDetected():
            return None
        case _:
            return f"{tag_of(event)} does not belong in a trajectory's stream"


def _generation_problem(
    state: TrajectoryState,
    event: GenerationStarted | GenerationResumed | TokensAppended | GenerationFinished,
    sealed: bool,
) -> str | None:
    current = state.generation
    if isinstance(event, GenerationStarted):
        if unfinished := _unfinished(state):
            return unfinished
        expected = state.generations + 1
        return None if event.generation == expected else f"generation {event.generation} started; expected {expected}"
    if current is None or event.generation != current.number:
        now = "none" if current is None else str(current.number)
        return f"{tag_of(event)} of generation {event.generation}; the current one is {now}"
    match event:
        case GenerationResumed():
            return _offset_problem("resumed", event.offset, current.count)
        case TokensAppended():
            return _offset_problem("a chunk starts", event.offset, current.count) or _length_problem(event, sealed)
        case GenerationFinished():
            return None if event.count == current.count else f"{event.count} tokens finished; {current.count} are here"


def _offset_problem(what: str, offset: int, count: int) -> str | None:
    return None if offset == count else f"{what} at offset {offset}; {count} tokens are here"


def _length_problem(chunk: TokensAppended, sealed: bool) -> str | None:
    lengths = (
        len(chunk.token_ids) / TOKEN_ID_BYTES,
        len(chunk.logprobs) / LOGPROB_BYTES,
        float(len(chunk.loss_mask)),
    )
    if chunk.count >= 1 and (sealed or all(length == chunk.count for length in lengths)):
        return None
    return "a chunk of {} tokens holds {:g} ids, {:g} logprobs and {:g} mask entries".format(chunk.count, *lengths)


def _action_problem(state: TrajectoryState, event: ActionStarted | ActionCommitted) -> str | None:
    match event:
        case ActionStarted():
            if unfinished := _unfinished(state):
                return unfinished
            if not state.generations:
                return f"action {event.action} started before any generation"
            expected = state.boundary.number + 1
            return None if event.action == expected else f"action {event.action} started; expected {expected}"
        case ActionCommitted():
            if state.action is None or state.action.action != event.action:
                return f"action {event.action} committed, but it was not started"
            if len(event.observation) % TOKEN_ID_BYTES:
                return f"an observation of {len(event.observation)} bytes is not whole tokens"
            return None


def _unfinished(state: TrajectoryState) -> str | None:
    if state.generation is not None:
        return f"generation {state.generation.number} is not finished"
    if state.action is not None:
        return f"action {state.action.action} is not committed"
    return None


def _rewind_problem(state: TrajectoryState, event: Rewound) -> str | None:
    to = Boundary(event.to_boundary, event.to_sequence)
    return None if to in state.boundaries else f"rewound to {tuple(to)}, which is no boundary of the live branch"


def _resume_problem(state: TrajectoryState, event: TrajectoryResumed) -> str | None:
    at = Boundary(event.boundary, event.boundary_sequence)
    return None if at == state.boundary else f"resumed at {tuple(at)}; the live branch is at {tuple(state.boundary)}"
