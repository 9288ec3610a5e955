"""The run's fold: who owns it, whether it goes on, which weights it serves, which learner state is complete.

`evolve` is pure and total.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from belayer.journal.codec import Recorded
from belayer.journal.events import (
    AnyEvent,
    EpochStarted,
    RunFinished,
    RunStarted,
    TrainerCheckpointed,
    WeightsPublished,
)


class RunState(msgspec.Struct, frozen=True):
    """A rollout, from its start to the removal of all that it created."""

    started: RunStarted | None = None
    finished: bool = False
    weight_version: int = 0
    trainer: TrainerCheckpointed | None = None
    """The newest complete learner state."""
    epoch: int = 0
    sequence: int = 0


EMPTY = RunState()


def fold(history: Iterable[Recorded], state: RunState = EMPTY) -> RunState:
    """The state after `history`."""
    for recorded in history:
        state = evolve(state, recorded.sequence, recorded.event)
    return state


def evolve(state: RunState, sequence: int, event: AnyEvent) -> RunState:
    """The state after one more event."""
    match event:
        case RunStarted():
            return replace(state, sequence=sequence, started=event, finished=False)
        case RunFinished():
            return replace(state, sequence=sequence, finished=True)
        case WeightsPublished():
            return replace(state, sequence=sequence, weight_version=max(state.weight_version, event.weight_version))
        case TrainerCheckpointed():
            newer = state.trainer is None or event.step >= state.trainer.step
            return replace(state, sequence=sequence, trainer=event if newer else state.trainer)
        case EpochStarted():
            return replace(state, sequence=sequence, epoch=event.epoch)
        case _:
            return replace(state, sequence=sequence)
