"""How fast a trajectory goes: when its boundaries were committed and how long its generations take.

A fold over the wall-clock times that the journal holds; pure and total. Times only steer when checkpoints are taken,
never what is restored. A clock that is set back stands still here for once, so a jump costs at most a checkpoint too
many or too few.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from belayer.journal.codec import Recorded
from belayer.journal.events import ActionCommitted, GenerationFinished, GenerationStarted, Rewound

RECENT = 16
"""How many generation times are kept."""


class Tempo(msgspec.Struct, frozen=True):
    """`boundary_ns`: time from the first event to each committed boundary of the live branch, by its sequence."""

    boundary_ns: dict[int, int] = {}
    now_ns: int = 0
    """From the first event to the last."""
    last_ns: int = 0
    """The wall-clock time of the last event."""
    generation_began_ns: int = 0
    recent_generations_s: tuple[float, ...] = ()
    """How long the last `RECENT` generations took, oldest first."""

    def work_since_s(self, boundary_sequence: int, checkpoint_sequence: int) -> float:
        """The time that it took to get from the checkpoint's boundary to the other: what a loss would cost."""
        end = self.boundary_ns.get(boundary_sequence, 0)
        begin = self.boundary_ns.get(checkpoint_sequence, 0)
        return max(0.0, (end - begin) / 1e9)


EMPTY = Tempo()


def fold(history: Iterable[Recorded], state: Tempo = EMPTY) -> Tempo:
    """The tempo after `history`, a trajectory's stream."""
    for recorded in history:
        state = _evolve(state, recorded)
    return state


def _evolve(state: Tempo, recorded: Recorded) -> Tempo:
    passed_ns = max(0, recorded.time_ns - state.last_ns) if state.last_ns else 0
    now_ns = state.now_ns + passed_ns
    state = replace(state, now_ns=now_ns, last_ns=recorded.time_ns)
    match recorded.event:
        case GenerationStarted():
            return replace(state, generation_began_ns=now_ns)
        case GenerationFinished():
            took_s = max(0.0, (now_ns - state.generation_began_ns) / 1e9)
            return replace(state, recent_generations_s=(*state.recent_generations_s, took_s)[-RECENT:])
        case ActionCommitted():
            return replace(state, boundary_ns=state.boundary_ns | {recorded.sequence: now_ns})
        case Rewound():
            kept = {at: ns for at, ns in state.boundary_ns.items() if at <= recorded.event.to_sequence}
            return replace(state, boundary_ns=kept)
        case _:
            return state
