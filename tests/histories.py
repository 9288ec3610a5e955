"""Random lives of a trajectory and its sandbox, as a hypothesis strategy: any history that the rules allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from belayer.journal.columns import pack_logprobs, pack_token_ids
from belayer.journal.events import (
    ActionCommitted,
    ActionStarted,
    AnyEvent,
    CheckpointDiscarded,
    CheckpointExtended,
    CheckpointPublished,
    CheckpointStarted,
    EpochStarted,
    FailureDetected,
    GenerationFinished,
    GenerationResumed,
    GenerationStarted,
    LeftOut,
    RecoveryStarted,
    Rewound,
    SandboxCreated,
    SandboxRestored,
    SandboxSpec,
    TokensAppended,
    TrajectoryResumed,
    TrajectoryStarted,
)
from belayer.projections import sandbox, trajectory
from belayer.projections.plan import RestoreSandbox, SandboxFailure, plan
from belayer.projections.trajectory_rules import problem_of

SPEC = SandboxSpec("image")


@dataclass
class Life:
    """Two streams side by side: `rollout` and `box` are their events, the states their folds."""

    rollout: list[AnyEvent] = field(default_factory=list)
    box: list[AnyEvent] = field(default_factory=list)
    prefix: trajectory.TrajectoryState = trajectory.EMPTY
    container: sandbox.SandboxState = sandbox.EMPTY

    def write(self, event: AnyEvent) -> None:
        """Append to the trajectory's stream, as the writer would: only what the rules allow."""
        problem = problem_of(self.prefix, event)
        assert problem is None, problem
        self.rollout.append(event)
        self.prefix = trajectory.evolve(self.prefix, len(self.rollout), event)

    def note(self, event: AnyEvent) -> None:
        """Append to the sandbox's stream."""
        self.box.append(event)
        self.container = sandbox.evolve(self.container, len(self.box), event)


def chunk(generation: int, offset: int, ids: list[int], version: int = 0) -> TokensAppended:
    """A chunk whose logprobs follow from its ids."""
    logprobs = pack_logprobs([-token / 7 for token in ids])
    return TokensAppended(generation, offset, len(ids), pack_token_ids(ids), logprobs, bytes([1] * len(ids)), version)


def _begin(life: Life) -> None:
    life.write(EpochStarted(1, "rollout"))
    life.write(TrajectoryStarted("run", "task", pack_token_ids([1, 2, 3])))
    life.note(EpochStarted(1, "rollout"))
    life.note(SandboxCreated("box-e1", "c1", "sha256:1", "host", 10, 100, "run", SPEC))


def _generate(life: Life, draw: st.DrawFn) -> None:
    if life.prefix.generation is None:
        life.write(GenerationStarted(life.prefix.generations + 1, "w", "w-1"))
    current = life.prefix.generation
    assert current is not None
    if draw(st.booleans()):
        life.write(GenerationResumed(current.number, current.count, "w", "w-2"))
    ids = draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4))
    life.write(chunk(current.number, current.count, ids, draw(st.integers(0, 1))))
    if draw(st.booleans()):
        assert life.prefix.generation is not None
        life.write(GenerationFinished(current.number, life.prefix.generation.count, "stop"))


def _act(life: Life, draw: st.DrawFn) -> None:
    number = life.prefix.boundary.number + 1
    if life.prefix.action is None:
        life.write(ActionStarted(number, f"command {number}", 60.0, life.container.incarnation))
    if draw(st.booleans()):
        life.write(ActionCommitted(number, 0, pack_token_ids([number]), b"digest", 0.1))


def _checkpoint(life: Life, draw: st.DrawFn) -> None:
    at = life.prefix.boundary
    name = f"t-b{at.number}-s{at.sequence}-{len(life.box)}"
    life.note(CheckpointStarted(name, life.container.incarnation, at.number, at.sequence))
    outcome = draw(st.integers(0, 4))
    earlier = _extensible(life)
    if outcome == 4 and earlier:
        life.note(CheckpointExtended(earlier, name, life.container.incarnation, at.number, at.sequence, 0.001, 0.01))
    elif outcome:
        alone = (LeftOut(7, "server", "drawn"),) if draw(st.booleans()) else ()
        place = life.container.incarnation, at.number, at.sequence
        life.note(CheckpointPublished(name, *place, 10, 0.01, 0.1, 10, (), alone))
    else:
        life.note(CheckpointDiscarded(name, "drawn"))


def _extensible(life: Life) -> str:
    """The newest checkpoint, if the container that stands at the boundary is the one that it describes."""
    if not life.container.held:
        return ""
    name, held = life.container.held[-1]
    ours = life.container.published[name].incarnation == life.container.incarnation
    follows = held.number < life.prefix.boundary.number
    return name if follows and (ours or held == life.container.restored_from) else ""


def _fail(life: Life, draw: st.DrawFn) -> None:
    failed = life.container.incarnation
    life.note(FailureDetected(failed, "died", "drawn", "detector"))
    life.note(RecoveryStarted(failed, "restore", "recovery"))
    life.write(EpochStarted(life.prefix.epoch + 1, "recovery"))
    decision = plan(life.prefix, life.container, SandboxFailure())
    if not isinstance(decision, RestoreSandbox):
        return
    life.write(RecoveryStarted(failed, "restore", "recovery"))
    at = decision.boundary
    new = f"box-e{len(life.box)}"
    made = new, "c2", "sha256:1", "host", 11, 101, 0.1, decision.left_out
    life.note(SandboxRestored(decision.checkpoint, at.number, at.sequence, *made))
    if decision.rewind:
        life.write(Rewound(at.number, at.sequence, "drawn"))
    life.write(TrajectoryResumed(at.number, at.sequence, new, decision.left_out))
    life.write(EpochStarted(life.prefix.epoch + 1, "rollout"))


@st.composite
def lives(draw: st.DrawFn, steps: int = 40) -> Life:
    """A trajectory that has begun and not ended, and its sandbox."""
    life = Life()
    _begin(life)
    for _ in range(draw(st.integers(0, steps))):
        choices: list[Callable[[Life, st.DrawFn], None]] = [_fail]
        if life.prefix.action is not None:
            choices += [_act] * 3
        elif life.prefix.generation is not None or not life.prefix.generations:
            choices += [_generate] * 4
        else:
            choices += [_generate, _act, _act, _act]
        if life.prefix.action is None:
            choices += [_checkpoint] * 2
        draw(st.sampled_from(choices))(life, draw)
    return life
