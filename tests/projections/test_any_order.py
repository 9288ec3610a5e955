"""Folds, rules and plans over events in any order at all: they are total, and depend on nothing but their arguments."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from belayer import ids
from belayer.actors.policy import UNKNOWN, Outlook, decide, history_of
from belayer.journal.codec import Recorded
from belayer.journal.events import AnyEvent, LeftOut, SandboxSpec, Sealed
from belayer.projections import run, sandbox, tempo, trajectory, worker
from belayer.projections.plan import EngineFailure, GiveUp, SandboxFailure, disposable, plan
from belayer.projections.trajectory_rules import problem_of
from replay.sandbox_audit import problem_of as sandbox_problem_of
from replay.worker_audit import problem_of as worker_problem_of
from tests.histories import Life, lives

FEW: dict[object, st.SearchStrategy[Any]] = {
    int: st.integers(0, 4),
    float: st.sampled_from([0.0, 0.5]),
    str: st.sampled_from(["", "a", "b"]),
    bytes: st.sampled_from([b"", bytes(4), bytes(5)]),
    bool: st.booleans(),
    SandboxSpec: st.just(SandboxSpec("image")),
    tuple[LeftOut, ...]: st.just(()),
}
"""Few values, so that events meet: names, numbers and sequences come again."""


def some(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    return FEW[kind] if kind in FEW else st.from_type(kind)


def of(kind: type[AnyEvent]) -> st.SearchStrategy[AnyEvent]:
    return st.builds(kind, **{field.name: some(field.type) for field in msgspec.structs.fields(kind)})


plain = st.one_of([of(kind) for kind in get_args(AnyEvent) if kind is not Sealed])
sealable = get_args(next(field.type for field in msgspec.structs.fields(Sealed) if field.name == "event"))
sealed = st.builds(Sealed, st.just("key"), st.just(b""), st.just(b""), st.one_of([of(kind) for kind in sealable]))
histories = st.lists(st.tuples(plain | sealed, st.integers(0, 10**12)), max_size=30)
failures = st.sampled_from([SandboxFailure(), EngineFailure(0), EngineFailure(1, "regenerate")])


def recorded(history: list[tuple[AnyEvent, int]]) -> list[Recorded]:
    return [
        Recorded(ids.trajectory("t"), 1, sequence, b"", time_ns, b"", b"", event)
        for sequence, (event, time_ns) in enumerate(history, 1)
    ]


@given(histories, failures, st.integers(0, 3))
def test_no_order_of_events_is_too_much(
    history: list[tuple[AnyEvent, int]], failure: SandboxFailure | EngineFailure, keep: int
) -> None:
    events = recorded(history)
    prefix, box = trajectory.fold(events), sandbox.fold(events)
    decision = plan(prefix, box, failure)
    assert decision == plan(trajectory.fold(events), sandbox.fold(events), failure)
    assert isinstance(decision, GiveUp) or prefix.boundaries
    assert set(disposable(prefix, box, keep)) <= set(box.published)
    assert worker.fold(events).sequence == run.fold(events).sequence == prefix.sequence == len(events)
    pace, captures = tempo.fold(events), history_of(events, UNKNOWN)
    assert pace.work_since_s(prefix.boundary.sequence, 0) >= 0.0
    decide(Outlook(1.0, 1, pace.recent_generations_s, 0.0), captures)


@given(histories)
def test_every_event_is_allowed_or_objected_to_in_words(history: list[tuple[AnyEvent, int]]) -> None:
    prefix, box, engines = trajectory.EMPTY, sandbox.EMPTY, worker.EMPTY
    for sequence, (event, _) in enumerate(history, 1):
        for problem in (problem_of(prefix, event), sandbox_problem_of(box, event), worker_problem_of(engines, event)):
            assert problem is None or problem
        prefix = trajectory.evolve(prefix, sequence, event)
        box = sandbox.evolve(box, sequence, event)
        engines = worker.evolve(engines, sequence, event)


def told(state: trajectory.TrajectoryState) -> tuple[Any, ...]:
    """What actors ask of a trajectory."""
    generation = None if state.generation is None else (state.generation.number, state.generation.count)
    action = None if state.action is None else state.action.action
    at = state.epoch, state.sequence, state.rewinds
    return state.phase, state.boundaries, generation, action, at, state.sandbox_incarnation, state.left_out


@given(lives(), st.data())
def test_the_outline_says_what_the_fold_says_and_holds_no_payload(life: Life, data: st.DataObject) -> None:
    events = recorded([(event, 0) for event in life.rollout])
    half = data.draw(st.integers(0, len(events)))
    outline = trajectory.outline(events[half:], trajectory.outline(events[:half]))
    assert told(outline) == told(trajectory.fold(events)) == told(life.prefix)
    assert outline.context() == [] and outline.segments == ()
    assert outline.action is None or outline.action.command == ""
