"""Judges a run's stream: it starts once, before anything else. RunFinished may be said again by another reaper."""

from __future__ import annotations

from belayer.journal.events import (
    AnyEvent,
    CommonEvent,
    EpochStarted,
    RunEvent,
    RunStarted,
    StreamArchived,
)
from belayer.projections.run import EMPTY, RunState, evolve
from replay.facts import RunFacts
from replay.findings import Check, Findings


class RunAudit:
    """Takes the events of one run's stream in."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._state = EMPTY

    def step(self, sequence: int, event: AnyEvent, judge: bool) -> None:
        """Take one event in; without `judge` only the facts for other streams are kept."""
        objection = problem_of(self._state, event) if judge else None
        if objection is not None:
            self._findings.add(sequence, *objection)
        self._state = evolve(self._state, sequence, event)

    def facts(self, whole: bool) -> RunFacts:
        """What other streams' checks need, once the stream has ended."""
        return RunFacts(self._state.finished, whole)


def problem_of(state: RunState, event: AnyEvent) -> tuple[Check, str] | None:
    """Why `event` may not come next in a run's stream; None when it may. Pure and total."""
    tag = event.__struct_config__.tag
    if not isinstance(event, RunEvent | CommonEvent):
        return Check.FOREIGN, f"{tag} does not belong in a run's stream"
    match event:
        case EpochStarted() | StreamArchived():
            return None
        case RunStarted():
            return (Check.LIFECYCLE, "a run that has started starts again") if state.started is not None else None
        case _ if state.started is None:
            return Check.LIFECYCLE, f"{tag} before the run has started"
        case _:
            return None
