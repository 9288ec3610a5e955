"""Makes a trajectory's state fit an event that the rules object to, so that one damage is one finding.

Whoever wrote the event is believed: the state becomes the nearest one in which nobody would object. Only the audit does
this; a writer is refused instead.
"""

from __future__ import annotations

from msgspec.structs import replace

from belayer.journal.events import (
    ActionCommitted,
    ActionStarted,
    AnyEvent,
    GenerationFinished,
    GenerationResumed,
    GenerationStarted,
    Rewound,
    TokensAppended,
    TrajectoryFinished,
    TrajectoryResumed,
)
from belayer.projections.trajectory import Boundary, Generation, Step, TrajectoryState, evolve

_MOST_INVENTED = 1000
"""A damaged number may be anything; so many generations are invented at most to match it."""


def made_to_fit(state: TrajectoryState, event: AnyEvent) -> TrajectoryState:
    """The nearest state in which nobody would object to the event: its writer is believed."""
    ended = state.phase in ("empty", "finished", "aborted")
    if ended or (state.phase == "recovering" and not isinstance(event, Rewound | TrajectoryResumed)):
        state = replace(state, phase="open")
    match event:
        case GenerationStarted():
            state = replace(state, generation=None, action=None)
            return _with_generations(state, event.generation - 1)
        case GenerationResumed() | TokensAppended():
            current = state.generation and Generation(event.generation, "", "", event.offset)
            return replace(state, generation=current)
        case GenerationFinished():
            return replace(state, generation=Generation(event.generation, "", "", event.count))
        case ActionStarted() | TrajectoryFinished():
            if state.generation is not None:
                state = evolve(state, state.sequence, GenerationFinished(state.generation.number, 0, ""))
            return replace(state, action=None)
        case ActionCommitted():
            return replace(state, action=ActionStarted(event.action, "", 0.0, ""))
        case Rewound():
            to = Boundary(event.to_boundary, event.to_sequence)
            state = evolve(state, state.sequence, event)
            step = Step(ActionStarted(to.number, "", 0.0, ""), ActionCommitted(to.number, 0, b"", b"", 0.0), to)
            return replace(state, boundaries=(*state.boundaries, to), segments=(*state.segments, step))
        case TrajectoryResumed():
            return replace(state, phase="recovering")
        case _:
            return state


def _with_generations(state: TrajectoryState, count: int) -> TrajectoryState:
    """The state with `count` finished generations, invented or taken off the end."""
    missing = count - state.generations
    if missing >= 0:
        return replace(state, segments=state.segments + (Generation(0, "", ""),) * min(missing, _MOST_INVENTED))
    segments = list(state.segments)
    for position in range(len(segments) - 1, -1, -1):
        if missing < 0 and isinstance(segments[position], Generation):
            del segments[position]
            missing += 1
    return replace(state, segments=tuple(segments))
