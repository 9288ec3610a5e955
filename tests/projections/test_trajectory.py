"""The trajectory's fold and its rules, by example: what a person would check by hand."""

import pytest

from belayer.journal.columns import pack_token_ids
from belayer.journal.events import (
    ActionCommitted,
    ActionStarted,
    AnyEvent,
    EpochStarted,
    GenerationFinished,
    GenerationResumed,
    GenerationStarted,
    RecoveryStarted,
    Rewound,
    SandboxRemoved,
    TrajectoryFinished,
    TrajectoryResumed,
    TrajectoryStarted,
)
from belayer.projections.trajectory import EMPTY, INITIAL, Boundary, TrajectoryState, evolve
from belayer.projections.trajectory_rules import problem_of
from tests.histories import chunk

START: list[AnyEvent] = [EpochStarted(1, "rollout"), TrajectoryStarted("run", "task", pack_token_ids([1, 2]))]
TURN: list[AnyEvent] = [
    GenerationStarted(1, "w", "w-1"),
    chunk(1, 0, [10, 11]),
    GenerationFinished(1, 2, "stop"),
    ActionStarted(1, "ls", 60.0, "box"),
    ActionCommitted(1, 0, pack_token_ids([20]), b"", 0.1),
]


def after(*events: AnyEvent) -> TrajectoryState:
    state = EMPTY
    for sequence, event in enumerate(events, 1):
        assert problem_of(state, event) is None
        state = evolve(state, sequence, event)
    return state


def test_the_context_is_prompt_generations_and_observations_in_order() -> None:
    state = after(*START, *TURN, GenerationStarted(2, "w", "w-1"), chunk(2, 0, [12]))
    assert state.context() == [1, 2, 10, 11, 20, 12]
    assert state.boundary == Boundary(1, 7)


def test_a_rewind_cuts_everything_after_its_boundary_and_numbers_start_again_from_there() -> None:
    second = [
        GenerationStarted(2, "w", "w-1"),
        chunk(2, 0, [12]),
        GenerationFinished(2, 1, "stop"),
        ActionStarted(2, "rm x", 60.0, "box"),
    ]
    state = after(*START, *TURN, *second, RecoveryStarted("box", "", ""), Rewound(1, 7, ""))
    assert state.context() == [1, 2, 10, 11, 20]
    assert (state.boundary, state.action, state.generation, state.rewinds) == (Boundary(1, 7), None, None, 1)
    again = after(
        *START, *TURN, *second, RecoveryStarted("box", "", ""), Rewound(1, 7, ""), TrajectoryResumed(1, 7, "box-2"),
        GenerationStarted(2, "w", "w-1"),
    )  # fmt: skip
    assert again.generation is not None and again.generation.number == 2


def test_a_rewind_to_the_initial_state_leaves_the_prompt() -> None:
    state = after(*START, *TURN, RecoveryStarted("box", "", ""), Rewound(0, 0, ""))
    assert state.context() == [1, 2]
    assert state.boundary == INITIAL


def test_a_generation_resumes_on_another_engine_with_all_its_tokens() -> None:
    state = after(*START, TURN[0], TURN[1], GenerationResumed(1, 2, "w", "w-2"), chunk(1, 2, [12]))
    assert state.generation is not None
    assert state.generation.token_ids() == [10, 11, 12]
    assert state.generation.incarnation == "w-2"
    assert state.generation.logprobs() == pytest.approx([-10 / 7, -11 / 7, -12 / 7])


@pytest.mark.parametrize(
    ("history", "event", "objection"),
    [
        (START, EpochStarted(3, "x"), "epoch 3 started; expected 2"),
        (START, TrajectoryStarted("run", "task", b""), "a trajectory that is open cannot start"),
        ([], GenerationStarted(1, "w", "w"), "generation-started in a trajectory that is empty"),
        (START, GenerationStarted(2, "w", "w"), "generation 2 started; expected 1"),
        (START, chunk(1, 0, [1]), "tokens-appended of generation 1; the current one is none"),
        ([*START, TURN[0]], chunk(1, 5, [1]), "a chunk starts at offset 5; 0 tokens are here"),
        ([*START, TURN[0]], GenerationStarted(2, "w", "w"), "generation 1 is not finished"),
        ([*START, *TURN[:2]], GenerationFinished(1, 3, "stop"), "3 tokens finished; 2 are here"),
        ([*START, *TURN[:2]], GenerationResumed(1, 1, "w", "w"), "resumed at offset 1; 2 tokens are here"),
        (START, ActionStarted(1, "ls", 1.0, "box"), "action 1 started before any generation"),
        ([*START, *TURN[:3]], ActionStarted(2, "ls", 1.0, "box"), "action 2 started; expected 1"),
        ([*START, *TURN[:4]], GenerationStarted(2, "w", "w"), "action 1 is not committed"),
        ([*START, *TURN[:3]], ActionCommitted(1, 0, b"", b"", 0.1), "action 1 committed, but it was not started"),
        ([*START, *TURN[:4]], ActionCommitted(1, 0, b"xyz", b"", 0.1), "an observation of 3 bytes is not whole tokens"),
        ([*START, *TURN], Rewound(1, 6, ""), "rewound to (1, 6), which is no boundary of the live branch"),
        ([*START, *TURN], TrajectoryResumed(1, 7, "box"), "resumed, but no recovery was started"),
        (
            [*START, *TURN, RecoveryStarted("box", "", "")],
            TrajectoryResumed(0, 0, "box"),
            "resumed at (0, 0); the live branch is at (1, 7)",
        ),
        ([*START, TURN[0]], TrajectoryFinished("done"), "generation 1 is not finished"),
        ([*START, *TURN, TrajectoryFinished("done")], GenerationStarted(2, "w", "w"), "that is finished"),
        (START, SandboxRemoved("box", ""), "sandbox-removed does not belong in a trajectory's stream"),
    ],
)
def test_what_may_not_come_next_is_named(history: list[AnyEvent], event: AnyEvent, objection: str) -> None:
    state = after(*history)
    problem = problem_of(state, event)
    assert problem is not None and objection in problem
    assert evolve(state, 99, event).sequence == 99


def test_a_chunk_whose_columns_disagree_is_named() -> None:
    state = after(*START, TURN[0])
    good = chunk(1, 0, [1, 2])
    bad = type(good)(1, 0, 2, good.token_ids, good.logprobs[:4], good.loss_mask, 0)
    assert problem_of(state, bad) == "a chunk of 2 tokens holds 2 ids, 1 logprobs and 2 mask entries"
