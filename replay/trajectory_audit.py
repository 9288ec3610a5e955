"""Judges a trajectory's stream event by event with the same rules and fold by which it was written.

Memory does not grow with tokens: what is folded carries no token columns, commands or observations. After a finding the
writer is believed and the state made to fit, so that one damage is one finding.
"""

from __future__ import annotations

from msgspec.structs import replace

from belayer.journal.events import (
    ActionCommitted,
    ActionStarted,
    AnyEvent,
    CommonEvent,
    EpochStarted,
    GenerationFinished,
    GenerationResumed,
    GenerationStarted,
    Rewound,
    TokensAppended,
    TrajectoryEvent,
    TrajectoryFinished,
    TrajectoryResumed,
    TrajectoryStarted,
    readable,
)
from belayer.projections.trajectory import EMPTY, Boundary, evolve
from belayer.projections.trajectory_rules import problem_of
from replay.boundaries import BoundaryIndex
from replay.environment import Environment
from replay.facts import Resumption, TrajectoryFacts
from replay.findings import Check, Findings
from replay.fit import made_to_fit


class TrajectoryAudit:
    """`generation` and `offset`: where the next chunk belongs. The caller may advance `offset` over one that fits."""

    def __init__(self, findings: Findings) -> None:
        self.generation = 0
        self.offset = 0
        self._findings = findings
        self._state = EMPTY
        self._environment = Environment()
        self._boundaries = BoundaryIndex()
        self._resumptions: list[Resumption] = []
        self._engines: dict[tuple[str, str], int] = {}
        self._cut = (0, 0)
        """Generation and action with which a writer would go on who had missed the rewind just now."""
        self._chunks_faulted = False
        self._recovery_at = 0

    def step(self, sequence: int, event: AnyEvent, judge: bool) -> None:
        """Take one event in; without `judge` only the facts for other streams are kept."""
        self._catch_up()
        if judge:
            self._judge(sequence, event)
        event = readable(event)
        self._note(sequence, event, judge)
        self._state = evolve(self._state, sequence, _without_payload(event))
        self._follow(sequence)

    def facts(self, sequence: int, whole: bool) -> TrajectoryFacts:
        """What other streams' checks need, once the stream has ended."""
        state = self._state
        return TrajectoryFacts(
            run=state.run,
            boundaries=self._boundaries,
            resumptions=self._resumptions,
            engines=self._engines,
            sequence=sequence,
            whole=whole,
            ended=state.phase in ("finished", "aborted"),
            recovery_at=self._recovery_at if state.phase == "recovering" else 0,
        )

    def _catch_up(self) -> None:
        generation = self._state.generation
        if generation is not None and generation.count != self.offset:
            self._state = replace(self._state, generation=replace(generation, count=self.offset))

    def _judge(self, sequence: int, event: AnyEvent) -> None:
        if isinstance(event, EpochStarted):
            return
        problem = problem_of(self._state, event)
        if problem is None:
            return
        event = readable(event)
        within = isinstance(event, GenerationResumed | TokensAppended | GenerationFinished)
        if not within or not self._chunks_faulted:
            self._findings.add(sequence, self._check_of(event), problem)
        self._chunks_faulted |= within
        self._state = made_to_fit(self._state, event)

    def _check_of(self, event: AnyEvent) -> Check:
        """Which check an objection to this event belongs to."""
        state = self._state
        busy = state.generation is not None or state.action is not None
        if not isinstance(event, TrajectoryEvent | CommonEvent):
            return Check.FOREIGN
        if isinstance(event, TrajectoryStarted) or state.phase in ("empty", "finished", "aborted"):
            return Check.LIFECYCLE
        if state.phase == "recovering" and not isinstance(event, Rewound):
            return Check.RECOVERY
        match event:
            case GenerationStarted() | GenerationResumed() | TokensAppended() | GenerationFinished():
                if event.generation == self._cut[0] and state.generation is None:
                    return Check.SUPERSEDED
                return Check.BOUNDARY if busy and isinstance(event, GenerationStarted) else Check.GENERATION
            case ActionStarted() | ActionCommitted():
                if event.action == self._cut[1] and not busy:
                    return Check.SUPERSEDED
                early = busy or not state.generations
                return Check.BOUNDARY if early and isinstance(event, ActionStarted) else Check.ACTION
            case TrajectoryFinished():
                return Check.BOUNDARY
            case Rewound():
                return Check.REWIND
            case TrajectoryResumed():
                return Check.RECOVERY
            case _:
                return Check.LIFECYCLE

    def _note(self, sequence: int, event: AnyEvent, judge: bool) -> None:
        """The environment's side, and what the other streams' checks will ask for."""
        match event:
            case ActionStarted():
                self._cut = (0, 0)
                if not self._environment.incarnation and event.sandbox_incarnation:
                    self._resumptions.append(Resumption(sequence, self._state.boundary, event.sandbox_incarnation))
                problem = self._environment.start_action(event.action, event.sandbox_incarnation, self._state.boundary)
                if problem is not None and judge:
                    self._findings.add(sequence, Check.ENVIRONMENT, f"action {event.action} {problem}")
            case ActionCommitted():
                boundary = Boundary(event.action, sequence)
                self._environment.commit(boundary)
                self._boundaries.add(*boundary, self._environment.incarnation)
            case TrajectoryResumed():
                boundary = Boundary(event.boundary, event.boundary_sequence)
                if self._environment.resume(event.sandbox_incarnation, boundary):
                    self._resumptions.append(Resumption(sequence, boundary, event.sandbox_incarnation, event.left_out))
            case Rewound():
                self._boundaries.supersede(event.to_sequence, sequence)
                self._cut = (self._state.generations + 1, self._state.boundary.number + 1)
                self._chunks_faulted = False
            case GenerationStarted():
                self._cut = (0, 0)
                self._chunks_faulted = False
                self._serve(event, sequence)
            case GenerationResumed():
                self._serve(event, sequence)
            case _:
                pass

    def _serve(self, event: GenerationStarted | GenerationResumed, sequence: int) -> None:
        if event.incarnation:
            self._engines.setdefault((event.worker, event.incarnation), sequence)

    def _follow(self, sequence: int) -> None:
        """Set where the next chunk belongs, and since when a recovery is open."""
        generation = self._state.generation
        if generation is None:
            self.generation = self.offset = 0
        else:
            self.generation, self.offset = generation.number, generation.count
        self._recovery_at = 0 if self._state.phase != "recovering" else self._recovery_at or sequence


def _without_payload(event: AnyEvent) -> AnyEvent:
    match event:
        case TokensAppended():
            return replace(event, token_ids=b"", logprobs=b"", loss_mask=b"")
        case ActionStarted():
            return replace(event, command="")
        case ActionCommitted():
            return replace(event, observation=b"", observation_digest=b"")
        case TrajectoryStarted():
            return replace(event, prompt=b"", labels={})
        case _:
            return event
