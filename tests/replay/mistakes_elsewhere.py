"""What writers of sandboxes, workers and runs can do wrong, and what does not fit between two streams."""

from __future__ import annotations

from msgspec.structs import replace

from belayer import ids
from belayer.journal.events import (
    CheckpointDiscarded,
    CheckpointExtended,
    CheckpointPublished,
    CheckpointStarted,
    EpochStarted,
    FailureDetected,
    HandoverCompleted,
    LeftOut,
    RecoveryStarted,
    Rewound,
    RunStarted,
    SandboxCreated,
    SandboxRemoved,
    SandboxSpec,
    TrajectoryFinished,
    TrajectoryResumed,
    TrajectoryStarted,
    WorkerReady,
    WorkerRegistered,
)
from tests.replay.journals import (
    BOX,
    ENGINE,
    RUN,
    Story,
    T,
    act,
    capture,
    chunk,
    generate,
    recovered,
    restored,
    started,
)
from tests.replay.mistakes_in_trajectories import superseded_boundary, written


def foreign_event_in_a_sandbox(story: Story) -> None:
    written(story, chunk(1, 0, 4), stream=BOX)


def foreign_event_in_a_worker(story: Story) -> None:
    written(story, TrajectoryFinished("done"), stream=ENGINE)


def foreign_event_in_a_run(story: Story) -> None:
    written(story, WorkerReady("w-2", 1), stream=RUN)


def run_started_twice(story: Story) -> None:
    written(story, RunStarted("host", 10, 100, "everysec", "0.1.0"), stream=RUN)


def epoch_skipped(story: Story) -> None:
    written(story, EpochStarted(9, "rollout"))


def action_in_another_sandbox(story: Story) -> None:
    generate(story, 4, "w-2")
    act(story, 4, "box-1")
    act(story, 5, "box-1")


def action_after_a_rewind_without_a_restore(story: Story) -> None:
    """The context goes back by one action, the sandbox does not."""
    number, newest = 3, story.sequence(T)
    generate(story, 4, "w-2")
    act(story, 4, "box-2")
    written(story, Rewound(number, newest, "weights"))
    generate(story, 4, "w-2")
    act(story, 4, "box-2")
    act(story, 5, "box-2")


def action_where_one_was_left_in_flight(story: Story) -> None:
    newest = story.sequence(T)
    generate(story, 4, "w-2")
    written(story, started(4, "box-2"), Rewound(3, newest, "weights"))
    generate(story, 4, "w-2")
    act(story, 4, "box-2")


def resumed_elsewhere_than_restored(story: Story) -> None:
    """The sandbox went back to boundary 2, the trajectory believes in 3."""
    newest, commits = story.sequence(T), [e for e in story.flat(BOX) if isinstance(e, CheckpointPublished)]
    held = commits[-1]
    story.take_over(BOX, "recovery")
    written(story, FailureDetected("box-2", "died", "", "detector"), stream=BOX)
    written(story, RecoveryStarted("box-2", "", "recovery"), stream=BOX)
    written(story, restored(held.checkpoint, held.boundary, held.boundary_sequence, "box-3"), stream=BOX)
    story.take_over(T, "recovery")
    written(story, RecoveryStarted("box-2", "", "recovery"), TrajectoryResumed(3, newest, "box-3"))


def resumed_in_a_sandbox_that_never_was(story: Story) -> None:
    newest = story.sequence(T)
    story.take_over(T, "recovery")
    written(story, RecoveryStarted("box-2", "", "recovery"), TrajectoryResumed(3, newest, "box-9"))


def captured_no_boundary(story: Story) -> None:
    capture(story, "t-b9", "box-2", 9, 12)


def captured_in_the_wrong_sandbox(story: Story) -> None:
    number, sequence = superseded_boundary(story)
    capture(story, "t-b2-late", "box-2", number, sequence)


def captured_a_dead_sandbox(story: Story) -> None:
    written(story, CheckpointStarted("t-b3", "box-1", 0, 0), CheckpointDiscarded("t-b3", ""), stream=BOX)


def two_captures_at_once(story: Story) -> None:
    written(story, CheckpointStarted("one", "box-2", 0, 0), CheckpointStarted("two", "box-2", 0, 0), stream=BOX)


def published_without_intent(story: Story) -> None:
    written(story, CheckpointPublished("t-b3", "box-2", 3, story.sequence(T), 1, 0.0, 0.0), stream=BOX)


def published_as_another_boundary(story: Story) -> None:
    newest = story.sequence(T)
    written(story, CheckpointStarted("t-b3", "box-2", 3, newest), stream=BOX)
    written(story, CheckpointPublished("t-b3", "box-2", 2, newest, 1, 0.0, 0.0), stream=BOX)


def extend(story: Story, checkpoint: str, begun: str, incarnation: str, number: int, sequence: int) -> None:
    """Started, and then found not to be needed."""
    story.take_over(BOX, "checkpointer")
    written(story, CheckpointStarted(begun, "box-2", 3, story.sequence(T)), stream=BOX)
    written(story, CheckpointExtended(checkpoint, begun, incarnation, number, sequence, 0.001, 0.01), stream=BOX)


def extended_without_intent(story: Story) -> None:
    newest = story.sequence(T)
    written(story, CheckpointExtended("t-b2-again", "t-b3", "box-2", 3, newest, 0.001, 0.01), stream=BOX)


def extended_to_another_boundary(story: Story) -> None:
    extend(story, "t-b2-again", "t-b3", "box-2", 4, story.sequence(T))


def extended_what_was_discarded(story: Story) -> None:
    extend(story, "t-b2", "t-b3", "box-2", 3, story.sequence(T))


def extended_another_containers(story: Story) -> None:
    """Checkpoint t-b1 is where box-2 began; once t-b2-again is captured there, a third container is something else."""
    held = [e for e in story.flat(BOX) if isinstance(e, CheckpointPublished)][-1]
    number, newest = 3, story.sequence(T)
    recovered(story, "box-2", held.checkpoint, held.boundary, held.boundary_sequence, "box-3")
    generate(story, 3, "w-2")
    newest = act(story, number, "box-3")
    story.take_over(BOX, "checkpointer")
    written(story, CheckpointStarted("t-b3", "box-3", number, newest), stream=BOX)
    written(story, CheckpointExtended("t-b1", "t-b3", "box-3", number, newest, 0.001, 0.01), stream=BOX)


def recovery_by(story: Story, checkpoint: str, number: int, sequence: int) -> None:
    """A recovery that dies after its restore, and is completed from the right checkpoint by another."""
    held = [e for e in story.flat(BOX) if isinstance(e, CheckpointPublished)][-1]
    story.take_over(BOX, "recovery")
    written(story, FailureDetected("box-2", "died", "", "detector"), stream=BOX)
    written(story, RecoveryStarted("box-2", "", "recovery"), stream=BOX)
    written(story, restored(checkpoint, number, sequence, "box-3"), stream=BOX)
    recovered(story, "box-3", held.checkpoint, held.boundary, held.boundary_sequence, "box-4")


def restored_from_nowhere(story: Story) -> None:
    recovery_by(story, "t-b8", 2, superseded_boundary(story)[1] + 20)


def restored_a_discarded_checkpoint(story: Story) -> None:
    recovery_by(story, "t-b2", 1, next(e for e in story.flat(T) if isinstance(e, Rewound)).to_sequence)


def restored_as_another_boundary(story: Story) -> None:
    recovery_by(story, "t-b1", 0, 0)


def restored_a_superseded_boundary(story: Story) -> None:
    """Checkpoint t-b4 was fine until a rewind superseded its boundary."""
    newest = 3, story.sequence(T)
    capture(story, "t-b3", "box-2", *newest)
    generate(story, 4, "w-2")
    fourth = act(story, 4, "box-2")
    capture(story, "t-b4", "box-2", 4, fourth)
    recovered(story, "box-2", "t-b3", *newest, "box-3")
    story.take_over(BOX, "recovery")
    written(story, FailureDetected("box-3", "died", "", "detector"), stream=BOX)
    written(story, RecoveryStarted("box-3", "", "recovery"), stream=BOX)
    written(story, restored("t-b4", 4, fourth, "box-4"), stream=BOX)
    recovered(story, "box-4", "t-b3", *newest, "box-5")


LACKS = (LeftOut(17, "postgres", "it has [io_uring] open, which CRIU cannot dump"),)


def files_alone(story: Story) -> tuple[str, int, int]:
    """A checkpoint of the files alone and then a failure; its name and its boundary."""
    at = 3, story.sequence(T)
    story.take_over(BOX, "checkpointer")
    story.write(BOX, CheckpointStarted("t-b3", "box-2", *at))
    story.write(BOX, CheckpointPublished("t-b3", "box-2", *at, 4096, 0.02, 0.2, 40, (), LACKS))
    story.write(BOX, FailureDetected("box-2", "died", "", "detector"), RecoveryStarted("box-2", "", "recovery"))
    story.write(T, RecoveryStarted("box-2", "", "recovery"))
    return "t-b3", *at


def restored_without_saying_what_is_left_out(story: Story) -> None:
    checkpoint, *at = files_alone(story)
    written(story, restored(checkpoint, *at, "box-3"), stream=BOX)
    story.write(T, TrajectoryResumed(*at, "box-3"))


def resumed_without_saying_what_is_left_out(story: Story) -> None:
    checkpoint, *at = files_alone(story)
    story.write(BOX, replace(restored(checkpoint, *at, "box-3"), left_out=LACKS))
    written(story, TrajectoryResumed(*at, "box-3"))


def restored_without_a_recovery(story: Story) -> None:
    written(story, restored("", 0, 0, "box-3"), stream=BOX)


def sandbox_created_twice(story: Story) -> None:
    again = SandboxCreated("box-3", "c9", "sha256:1", "host", 20, 200, "r", SandboxSpec("image"))
    written(story, again, stream=BOX)


def checkpoint_after_the_removal(story: Story) -> None:
    written(story, SandboxRemoved("box-2", "early"), CheckpointStarted("late", "box-2", 0, 0), stream=BOX)


def sandbox_recovery_left_open(story: Story) -> None:
    """The sandbox of another trajectory, whose recovery nobody completed although the run is over."""
    other = ids.sandbox("other")
    story.take_over(other, "rollout")
    spec = SandboxSpec("image")
    written(story, SandboxCreated("o-1", "c9", "sha256:1", "host", 30, 300, "r", spec), stream=other)
    written(story, FailureDetected("o-1", "died", "", "detector"), stream=other)
    written(story, RecoveryStarted("o-1", "", "recovery"), stream=other)


def trajectory_recovery_left_open(story: Story) -> None:
    other = ids.trajectory("other")
    story.take_over(other, "rollout")
    written(story, TrajectoryStarted("r", "task", b""), RecoveryStarted("o-1", "", "recovery"), stream=other)


def worker_recovery_left_open(story: Story) -> None:
    other = ids.worker("other")
    story.take_over(other, "main")
    story.write(other, WorkerRegistered("o-1", "main", "host", 9, 9, "http://h:9", "r"), WorkerReady("o-1", 1))
    written(story, FailureDetected("o-1", "died", "", "detector"), stream=other)
    written(story, RecoveryStarted("o-1", "", "recovery"), stream=other)


def engine_that_nobody_registered(story: Story) -> None:
    generate(story, 4, "w-9")


def ready_without_registration(story: Story) -> None:
    written(story, WorkerReady("w-9", 1), stream=ENGINE)


def registered_twice(story: Story) -> None:
    written(story, WorkerRegistered("w-2", "main", "host", 9, 9, "http://h:9", "r"), stream=ENGINE)


def handover_to_the_dead(story: Story) -> None:
    written(story, HandoverCompleted("w-2", "w-1", 0.1), stream=ENGINE)


def handover_from_another(story: Story) -> None:
    third = WorkerRegistered("w-3", "shadow", "host", 13, 130, "http://h:3", "r")
    written(story, third, HandoverCompleted("w-1", "w-3", 0.1), stream=ENGINE)
