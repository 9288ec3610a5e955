"""What a writer of a trajectory can do wrong; each mistake is made in an otherwise sound story."""

from __future__ import annotations

from belayer.ids import StreamId
from belayer.journal.columns import pack_logprobs
from belayer.journal.events import (
    AnyEvent,
    GenerationFinished,
    GenerationResumed,
    GenerationStarted,
    RecoveryStarted,
    Rewound,
    TokensAppended,
    TrajectoryAborted,
    TrajectoryFinished,
    TrajectoryResumed,
    TrajectoryStarted,
    WorkerReady,
)
from tests.replay.journals import (
    Story,
    T,
    act,
    capture,
    chunk,
    committed,
    generate,
    recovered,
    started,
)


def written(story: Story, *events: AnyEvent, stream: StreamId = T) -> None:
    for event in events:
        story.write(stream, event)


def overlapping_chunk(story: Story) -> None:
    written(story, GenerationStarted(4, "w", "w-2"), chunk(4, 0, 4), chunk(4, 3, 4), GenerationFinished(4, 7, "stop"))


def hole_between_chunks(story: Story) -> None:
    written(story, GenerationStarted(4, "w", "w-2"), chunk(4, 0, 4), chunk(4, 8, 4), GenerationFinished(4, 12, "stop"))


def one_wrong_offset(story: Story) -> None:
    finished = GenerationFinished(4, 12, "stop")
    written(story, GenerationStarted(4, "w", "w-2"), chunk(4, 0, 4), chunk(4, 5, 4), chunk(4, 8, 4), finished)


def short_logprobs(story: Story) -> None:
    whole = chunk(4, 0, 4)
    short = TokensAppended(4, 0, 4, whole.token_ids, pack_logprobs([0.0] * 3), whole.loss_mask, 1)
    written(story, GenerationStarted(4, "w", "w-2"), short, chunk(4, 4, 4), GenerationFinished(4, 8, "stop"))


def empty_chunk(story: Story) -> None:
    written(story, GenerationStarted(4, "w", "w-2"), chunk(4, 0, 0), GenerationFinished(4, 0, "stop"))


def miscounted_generation(story: Story) -> None:
    written(story, GenerationStarted(4, "w", "w-2"), chunk(4, 0, 4), GenerationFinished(4, 5, "stop"))


def resumed_at_the_wrong_token(story: Story) -> None:
    written(story, GenerationStarted(4, "w", "w-2"), chunk(4, 0, 4), GenerationResumed(4, 3, "w", "w-2"))
    written(story, chunk(4, 4, 4), GenerationFinished(4, 8, "stop"))


def skipped_generation(story: Story) -> None:
    generate(story, 6, "w-2")
    generate(story, 7, "w-2")


def repeated_generation(story: Story) -> None:
    generate(story, 3, "w-2")
    generate(story, 4, "w-2")


def tokens_without_generation(story: Story) -> None:
    written(story, chunk(4, 0, 4), GenerationFinished(4, 4, "stop"))
    generate(story, 5, "w-2")


def stray_chunk(story: Story) -> None:
    written(story, chunk(9, 0, 4))
    generate(story, 4, "w-2")


def generation_during_an_action(story: Story) -> None:
    generate(story, 4, "w-2")
    written(story, started(4, "box-2"))
    generate(story, 5, "w-2")


def action_before_its_generation_finished(story: Story) -> None:
    written(story, GenerationStarted(4, "w", "w-2"), chunk(4, 0, 4), started(4, "box-2"), committed(4))
    generate(story, 5, "w-2")


def finished_in_mid_generation(story: Story) -> None:
    written(story, GenerationStarted(4, "w", "w-2"), chunk(4, 0, 4))


def action_twice(story: Story) -> None:
    generate(story, 4, "w-2")
    act(story, 3, "box-2")
    act(story, 4, "box-2")


def action_skipped(story: Story) -> None:
    generate(story, 4, "w-2")
    act(story, 5, "box-2")
    act(story, 6, "box-2")


def outcome_twice(story: Story) -> None:
    generate(story, 4, "w-2")
    act(story, 4, "box-2")
    written(story, committed(4))
    act(story, 5, "box-2")


def observation_of_half_a_token(story: Story) -> None:
    generate(story, 4, "w-2")
    whole = committed(4)
    half = type(whole)(4, 0, whole.observation[:-2], whole.observation_digest, 0.1)
    written(story, started(4, "box-2"), half)


def superseded_boundary(story: Story) -> tuple[int, int]:
    """Boundary 2 of the branch that the sandbox's death superseded."""
    commits = [i for i, event in enumerate(story.flat(T), 1) if isinstance(event, type(committed(1)))]
    return 2, commits[1]


def rewound_to_a_superseded_boundary(story: Story) -> None:
    number, sequence = superseded_boundary(story)
    story.take_over(T, "recovery")
    written(story, RecoveryStarted("box-2", "", "recovery"))
    story.write(T, Rewound(number, sequence, ""), TrajectoryResumed(number, sequence, "box-2"))


def rewound_to_no_boundary(story: Story) -> None:
    written(story, Rewound(3, 4711, ""))


def rewind_in_mid_generation(story: Story) -> tuple[int, int]:
    """Rewind, as recovery does, from a generation 4 in flight to the newest boundary; its name."""
    newest = 3, story.sequence(T)
    capture(story, "t-b3", "box-2", *newest)
    generate(story, 4, "w-2")
    act(story, 4, "box-2")
    written(story, GenerationStarted(5, "w", "w-2"), chunk(5, 0, 4))
    recovered(story, "box-2", "t-b3", *newest, "box-3")
    return newest


def tokens_of_a_superseded_generation(story: Story) -> None:
    rewind_in_mid_generation(story)
    written(story, chunk(5, 4, 4), GenerationFinished(5, 8, "stop"))


def superseded_generation_resumed(story: Story) -> None:
    rewind_in_mid_generation(story)
    written(story, GenerationResumed(5, 4, "w", "w-2"), chunk(5, 4, 4), GenerationFinished(5, 8, "stop"))


def outcome_of_a_superseded_action(story: Story) -> None:
    newest = 3, story.sequence(T)
    capture(story, "t-b3", "box-2", *newest)
    generate(story, 4, "w-2")
    written(story, started(4, "box-2"))
    recovered(story, "box-2", "t-b3", *newest, "box-3")
    written(story, committed(4))


def next_action_of_a_superseded_branch(story: Story) -> None:
    rewind_in_mid_generation(story)
    act(story, 5, "box-3")


def resumed_without_a_recovery(story: Story) -> None:
    written(story, TrajectoryResumed(3, story.sequence(T), "box-2"))


def resumed_at_another_boundary(story: Story) -> None:
    story.take_over(T, "recovery")
    written(story, RecoveryStarted("box-2", "", "recovery"), TrajectoryResumed(1, 10, "box-2"))


def written_during_a_recovery(story: Story) -> None:
    story.take_over(T, "recovery")
    written(story, RecoveryStarted("box-2", "", "recovery"))
    generate(story, 4, "w-2")


def started_twice(story: Story) -> None:
    written(story, TrajectoryStarted("r", "again", b""))


def finished_twice(story: Story) -> None:
    written(story, TrajectoryFinished("submitted"))


def aborted_and_finished(story: Story) -> None:
    written(story, TrajectoryAborted("given up"))


def foreign_event_in_a_trajectory(story: Story) -> None:
    written(story, WorkerReady("w-2", 1))
