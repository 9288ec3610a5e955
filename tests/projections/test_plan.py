"""The promises of `plan`, each as a property over random lives of a trajectory and its sandbox."""

from hypothesis import given
from hypothesis import strategies as st

from belayer.journal.events import (
    CheckpointDiscarded,
    CheckpointExtended,
    CheckpointPublished,
    EpochStarted,
    Rewound,
    SandboxCreated,
    SandboxRestored,
    TrajectoryFinished,
    TrajectoryResumed,
)
from belayer.projections import sandbox, trajectory
from belayer.projections.plan import (
    MAX_REPEATS,
    EngineFailure,
    GiveUp,
    LeaveAlone,
    Regenerate,
    RestoreSandbox,
    ResumeGeneration,
    SandboxFailure,
    disposable,
    newest_checkpoint,
    plan,
)
from belayer.projections.trajectory import INITIAL, Boundary
from tests.histories import SPEC, Life, lives


def holders(life: Life) -> list[tuple[str, Boundary]]:
    """Which boundary which checkpoint holds, from the events alone."""
    found: list[tuple[str, Boundary]] = []
    for event in life.box:
        match event:
            case CheckpointPublished() | CheckpointExtended():
                found.append((event.checkpoint, Boundary(event.boundary, event.boundary_sequence)))
            case CheckpointDiscarded():
                found = [pair for pair in found if pair[0] != event.checkpoint]
            case _:
                pass
    return found


@given(lives())
def test_an_engines_death_loses_no_journaled_token(life: Life) -> None:
    decision = plan(life.prefix, life.container, EngineFailure(weight_version=9))
    generation = life.prefix.generation
    if generation is None:
        assert isinstance(decision, LeaveAlone)
    else:
        assert decision == ResumeGeneration(generation.number, generation.count)
        assert life.prefix.context()[len(life.prefix.context()) - generation.count :] == generation.token_ids()


@given(lives(), st.integers(0, 2))
def test_newer_weights_regenerate_only_when_the_policy_says_so(life: Life, version: int) -> None:
    decision = plan(life.prefix, life.container, EngineFailure(version, policy="regenerate"))
    generation = life.prefix.generation
    if generation is None:
        assert isinstance(decision, LeaveAlone)
    elif all(chunk.weight_version == version for chunk in generation.chunks):
        assert decision == ResumeGeneration(generation.number, generation.count)
    else:
        assert decision == Regenerate(life.prefix.boundary)


@given(lives())
def test_the_newest_published_checkpoint_of_the_live_branch_wins(life: Life) -> None:
    decision = plan(life.prefix, life.container, SandboxFailure())
    if isinstance(decision, GiveUp):
        assert life.container.repeats >= MAX_REPEATS
        return
    assert isinstance(decision, RestoreSandbox)
    assert decision.boundary in life.prefix.boundaries
    held = holders(life)
    live = [boundary for _, boundary in held if boundary in life.prefix.boundaries]
    assert decision.boundary == max(live, default=INITIAL, key=lambda boundary: boundary.sequence)
    if decision.checkpoint:
        assert (decision.checkpoint, decision.boundary) in held
    else:
        assert decision.boundary == INITIAL


@given(lives())
def test_the_plan_says_what_its_checkpoint_lacks(life: Life) -> None:
    decision = plan(life.prefix, life.container, SandboxFailure())
    if isinstance(decision, RestoreSandbox):
        lacks = {event.checkpoint: event.left_out for event in life.box if isinstance(event, CheckpointPublished)}
        assert decision.left_out == lacks.get(decision.checkpoint, ())
        resumed = [event for event in life.rollout if isinstance(event, TrajectoryResumed)]
        assert life.prefix.left_out == (resumed[-1].left_out if resumed else ())


@given(lives())
def test_context_and_environment_agree_after_the_plan(life: Life) -> None:
    decision = plan(life.prefix, life.container, SandboxFailure())
    if not isinstance(decision, RestoreSandbox):
        return
    at = decision.boundary
    after = life.prefix
    if decision.rewind:
        after = trajectory.evolve(after, after.sequence + 1, Rewound(at.number, at.sequence, "test"))
        assert after.generation is None
    assert after.boundary == at
    assert after.action is None
    assert len(list(after.steps)) == at.number


@given(lives())
def test_tokens_after_the_restored_boundary_are_kept_when_no_action_ran_there(life: Life) -> None:
    decision = plan(life.prefix, life.container, SandboxFailure())
    if isinstance(decision, RestoreSandbox) and not decision.rewind:
        assert life.prefix.action is None
        assert life.prefix.boundary == decision.boundary


@given(lives(), st.sampled_from([SandboxFailure(), EngineFailure(0)]))
def test_an_ended_trajectory_is_left_alone(life: Life, failure: SandboxFailure | EngineFailure) -> None:
    ended = trajectory.evolve(life.prefix, life.prefix.sequence + 1, TrajectoryFinished("submitted"))
    assert isinstance(plan(ended, life.container, failure), LeaveAlone)


def test_a_trajectory_that_has_not_begun_gets_its_container_back() -> None:
    created = sandbox.evolve(sandbox.EMPTY, 1, SandboxCreated("box", "c", "sha256:1", "host", 1, 1, "run", SPEC))
    assert plan(trajectory.EMPTY, created, SandboxFailure()) == RestoreSandbox("", INITIAL, rewind=False)
    assert isinstance(plan(trajectory.EMPTY, created, EngineFailure(0)), LeaveAlone)


@given(lives(), st.integers(1, 3))
def test_retention_keeps_what_recovery_would_choose_now_and_after_its_loss(life: Life, keep: int) -> None:
    dropped = disposable(life.prefix, life.container, keep)
    kept = {name: made for name, made in life.container.published.items() if name not in dropped}
    assert len(kept) <= keep
    chosen, boundary = newest_checkpoint(life.prefix, life.container)
    assert chosen not in dropped
    assert boundary == INITIAL or chosen in kept


def test_a_sandbox_that_fails_at_one_boundary_again_and_again_is_given_up() -> None:
    state = sandbox.EMPTY
    for sequence in range(1, MAX_REPEATS + 1):
        assert isinstance(plan(_open(), state, SandboxFailure()), RestoreSandbox)
        restored = SandboxRestored("", 0, 0, f"box-{sequence}", "c", "sha256:1", "host", 1, 1, 0.1)
        state = sandbox.evolve(state, sequence, restored)
    decision = plan(_open(), state, SandboxFailure())
    assert isinstance(decision, GiveUp)
    assert "6 times in a row" in decision.reason


def _open() -> trajectory.TrajectoryState:
    return trajectory.TrajectoryState(phase="open")


@given(lives())
def test_folding_in_two_parts_gives_the_same_state(life: Life) -> None:
    half = len(life.rollout) // 2
    state = trajectory.EMPTY
    for sequence, event in enumerate(life.rollout[:half], 1):
        state = trajectory.evolve(state, sequence, event)
    for sequence, event in enumerate(life.rollout[half:], half + 1):
        state = trajectory.evolve(state, sequence, event)
    assert state == life.prefix
    assert state.epoch == sum(isinstance(event, EpochStarted) for event in life.rollout)
    resumed = [event for event in life.rollout if isinstance(event, TrajectoryResumed)]
    assert state.sandbox_incarnation == (resumed[-1].sandbox_incarnation if resumed else "")
