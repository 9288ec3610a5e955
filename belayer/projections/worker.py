"""The worker's fold: which engine incarnation serves, which stands by, which are dead.

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
    EpochStarted,
    FailureDetected,
    HandoverCompleted,
    RecoveryStarted,
    WorkerDraining,
    WorkerReady,
    WorkerRegistered,
    WorkerRemoved,
)

EngineStatus = Literal["starting", "ready", "failed", "removed"]


class EngineState(msgspec.Struct, frozen=True):
    """One engine incarnation."""

    registered: WorkerRegistered
    status: EngineStatus = "starting"
    weight_version: int = 0
    evidence: str = ""
    draining: str = ""
    """Why it is to be replaced although it serves; empty when it is not."""


class WorkerState(msgspec.Struct, frozen=True):
    """`main` is the incarnation that requests go to, also when it has failed; `recovering`: someone is at it."""

    engines: dict[str, EngineState] = {}
    main: str = ""
    recovering: bool = False
    handovers: int = 0
    run: str = ""
    epoch: int = 0
    sequence: int = 0
    writer: str = ""
    """Who began the epoch."""
    recovery_epoch: int = 0
    """The epoch in which the newest recovery was begun."""
    failed_starts: int = 0
    """How many starts of a main in a row have failed: each is one more failure of the one that it was to replace."""
    excluded: str = ""
    """Why nothing is started for this worker any more: its GPU is not healthy. Its requests go to other workers."""

    @property
    def serving(self) -> EngineState | None:
        """The main, if it is ready."""
        engine = self.engines.get(self.main)
        ready = engine is not None and engine.status == "ready" and not self.excluded
        return engine if ready else None

    @property
    def shadow(self) -> EngineState | None:
        """A ready standby, if one is."""
        return next(
            (
                engine
                for name, engine in self.engines.items()
                if name != self.main and engine.status == "ready" and engine.registered.role == "shadow"
            ),
            None,
        )


EMPTY = WorkerState()


def fold(history: Iterable[Recorded], state: WorkerState = EMPTY) -> WorkerState:
    """The state after `history`."""
    for recorded in history:
        state = evolve(state, recorded.sequence, recorded.event)
    return state


def evolve(state: WorkerState, sequence: int, event: AnyEvent) -> WorkerState:
    """The state after one more event."""
    match event:
        case WorkerRegistered():
            engines = state.engines | {event.incarnation: EngineState(event)}
            main = event.incarnation if event.role == "main" else state.main
            return replace(state, sequence=sequence, engines=engines, main=main, run=event.run)
        case WorkerReady():
            ready = _with(state, event.incarnation, status="ready", weight_version=event.weight_version)
            recovering = state.recovering and event.incarnation != state.main
            starts = 0 if event.incarnation == state.main else state.failed_starts
            return replace(state, sequence=sequence, engines=ready, recovering=recovering, failed_starts=starts)
        case FailureDetected():
            again = state.recovering and event.incarnation == state.main
            starts = state.failed_starts + again
            recovering = state.recovering and not again
            failed = _with(state, event.incarnation, status="failed", evidence=event.evidence)
            excluded = event.evidence if event.kind == "gpu" else state.excluded
            return replace(
                state,
                sequence=sequence,
                engines=failed,
                excluded=excluded,
                recovering=recovering,
                failed_starts=starts,
            )
        case RecoveryStarted():
            return replace(state, sequence=sequence, recovering=True, recovery_epoch=state.epoch)
        case HandoverCompleted():
            return replace(
                state,
                sequence=sequence,
                engines=_with(state, event.from_incarnation, status="failed"),
                main=event.to_incarnation,
                recovering=False,
                failed_starts=0,
                handovers=state.handovers + 1,
            )
        case WorkerDraining():
            return replace(state, sequence=sequence, engines=_with(state, event.incarnation, draining=event.reason))
        case WorkerRemoved():
            return replace(state, sequence=sequence, engines=_with(state, event.incarnation, status="removed"))
        case EpochStarted():
            return replace(state, sequence=sequence, epoch=event.epoch, writer=event.writer)
        case _:
            return replace(state, sequence=sequence)


def _with(state: WorkerState, incarnation: str, **changes: object) -> dict[str, EngineState]:
    engine = state.engines.get(incarnation)
    if engine is None or engine.status == "removed":
        return state.engines
    return state.engines | {incarnation: replace(engine, **changes)}
