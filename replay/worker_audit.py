"""Judges a worker's stream: which engine incarnations there are, which serves, and who took over from whom."""

from __future__ import annotations

from typing import assert_never

from belayer.journal.events import (
    AnyEvent,
    CommonEvent,
    EpochStarted,
    FailureDetected,
    HandoverCompleted,
    RecoveryStarted,
    StreamArchived,
    WorkerDraining,
    WorkerEvent,
    WorkerReady,
    WorkerRegistered,
    WorkerRemoved,
)
from belayer.projections.worker import EMPTY, WorkerState, evolve
from replay.facts import WorkerFacts
from replay.findings import Check, Findings

Objection = tuple[Check, str]


class WorkerAudit:
    """Takes the events of one worker's stream in."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._state = EMPTY
        self._recovery_at = 0

    def step(self, sequence: int, event: AnyEvent, judge: bool) -> None:
        """Take one event in; without `judge` only the facts for other streams are kept."""
        objection = problem_of(self._state, event) if judge else None
        if objection is not None:
            self._findings.add(sequence, *objection)
        self._state = evolve(self._state, sequence, event)
        main = self._state.engines.get(self._state.main)
        open_ = self._state.recovering and main is not None and main.status != "removed"
        self._recovery_at = (self._recovery_at or sequence) if open_ else 0

    def facts(self, whole: bool) -> WorkerFacts:
        """What other streams' checks need, once the stream has ended."""
        state = self._state
        return WorkerFacts(state.run, frozenset(state.engines), whole, self._recovery_at)


def problem_of(state: WorkerState, event: AnyEvent) -> Objection | None:
    """Why `event` may not come next in a worker's stream; None when it may. Pure and total."""
    if not isinstance(event, WorkerEvent | CommonEvent):
        return Check.FOREIGN, f"{event.__struct_config__.tag} does not belong in a worker's stream"
    match event:
        case EpochStarted() | StreamArchived():
            return None
        case WorkerRegistered():
            known = event.incarnation in state.engines
            return (Check.ENGINE, f"engine {event.incarnation} is registered twice") if known else None
        case WorkerReady():
            return _engine_problem(state, event.incarnation, "is ready")
        case FailureDetected():
            return _known_problem(state, event.incarnation, "failed")
        case WorkerDraining():
            return _engine_problem(state, event.incarnation, "is to be replaced")
        case WorkerRemoved():
            return _known_problem(state, event.incarnation, "was removed")
        case RecoveryStarted():
            return _known_problem(state, event.failed_incarnation, "is being replaced")
        case HandoverCompleted():
            if event.from_incarnation != state.main:
                what = f"handed over from {event.from_incarnation}, but the main was {state.main or 'none'}"
                return Check.ENGINE, what
            return _engine_problem(state, event.to_incarnation, "takes over")
        case _:
            assert_never(event)


def _known_problem(state: WorkerState, incarnation: str, what: str) -> Objection | None:
    known = incarnation in state.engines
    return None if known else (Check.ENGINE, f"engine {incarnation} {what}, but was never registered")


def _engine_problem(state: WorkerState, incarnation: str, what: str) -> Objection | None:
    if objection := _known_problem(state, incarnation, what):
        return objection
    status = state.engines[incarnation].status
    dead = status in ("failed", "removed")
    return (Check.ENGINE, f"engine {incarnation} {what}, but it is {status}") if dead else None
