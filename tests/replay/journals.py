"""Whole journals for the audit's tests: built stream by stream as their writers would, then damaged on purpose.

A `Story` holds events only, so that a writer's mistake is a change of events and the chain around it is right. What
storage can do to a journal is done to the encoded entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from belayer import __version__, ids
from belayer.ids import StreamId
from belayer.journal.codec import GENESIS, Entry, encode_entry
from belayer.journal.columns import pack_logprobs, pack_token_ids
from belayer.journal.events import (
    ActionCommitted,
    ActionStarted,
    AnyEvent,
    CheckpointDiscarded,
    CheckpointPublished,
    CheckpointStarted,
    EpochStarted,
    FailureDetected,
    GenerationFinished,
    GenerationResumed,
    GenerationStarted,
    HandoverCompleted,
    RecoveryStarted,
    Rewound,
    RunFinished,
    RunStarted,
    SandboxCreated,
    SandboxRemoved,
    SandboxRestored,
    SandboxSpec,
    TokensAppended,
    TrajectoryFinished,
    TrajectoryResumed,
    TrajectoryStarted,
    WeightsPublished,
    WorkerReady,
    WorkerRegistered,
    WorkerRemoved,
)

SECOND = 1_000_000_000
T, BOX, ENGINE, RUN = ids.trajectory("t"), ids.sandbox("t"), ids.worker("w"), ids.run("r")


def chunk(generation: int, offset: int, count: int, version: int = 1) -> TokensAppended:
    token_ids = pack_token_ids(range(offset, offset + count))
    logprobs = pack_logprobs([-0.5] * count)
    return TokensAppended(generation, offset, count, token_ids, logprobs, b"\x01" * count, version)


def started(action: int, incarnation: str, command: str = "") -> ActionStarted:
    return ActionStarted(action, command or f"make step-{action}", 60.0, incarnation)


def committed(action: int) -> ActionCommitted:
    return ActionCommitted(action, 0, pack_token_ids([action, 7]), b"d" * 16, 0.4)


def restored(checkpoint: str, number: int, sequence: int, incarnation: str) -> SandboxRestored:
    return SandboxRestored(checkpoint, number, sequence, incarnation, "c2", "sha256:1", "host", 21, 210, 0.3)


@dataclass
class Story:
    """The events of a journal's streams, in order, with the time at which each was written."""

    streams: dict[StreamId, list[tuple[int, tuple[AnyEvent, ...]]]] = field(default_factory=dict)
    now_ns: int = 1_700_000_000 * SECOND

    def write(self, stream: StreamId, *events: AnyEvent, after_s: float = 0.2) -> int:
        """One append; the sequence of its last event."""
        self.now_ns += int(after_s * SECOND)
        self.streams.setdefault(stream, []).append((self.now_ns, events))
        return self.sequence(stream)

    def sequence(self, stream: StreamId) -> int:
        return sum(len(events) for _, events in self.streams.get(stream, []))

    def take_over(self, stream: StreamId, writer: str) -> None:
        epochs = [e for _, group in self.streams.get(stream, []) for e in group if isinstance(e, EpochStarted)]
        self.write(stream, EpochStarted(len(epochs) + 1, writer, __version__))

    def flat(self, stream: StreamId) -> list[AnyEvent]:
        return [event for _, events in self.streams[stream] for event in events]

    def place(self, stream: StreamId, kind: type, nth: int = 0) -> int:
        """The index, among the stream's appends, of the nth one that begins with such an event."""
        found = [i for i, (_, events) in enumerate(self.streams[stream]) if isinstance(events[0], kind)]
        return found[nth]

    def entries(self) -> list[tuple[StreamId, Entry]]:
        """The journal as stored."""
        return [(stream, entry) for stream in sorted(self.streams) for entry in self.encoded(stream)]

    def encoded(self, stream: StreamId) -> Iterator[Entry]:
        epoch, sequence, digest = 0, 0, GENESIS
        for time_ns, events in self.streams[stream]:
            if isinstance(events[0], EpochStarted):
                epoch = events[0].epoch
            event_ids = [bytes([sequence % 256, n]) * 8 for n in range(len(events))]
            entry, digest = encode_entry(epoch, sequence, digest, events, event_ids, time_ns)
            sequence = entry.last_sequence
            yield entry


def generate(story: Story, number: int, incarnation: str = "w-1", chunks: int = 3) -> None:
    story.write(T, GenerationStarted(number, "w", incarnation))
    for n in range(chunks):
        story.write(T, chunk(number, n * 4, 4))
    story.write(T, GenerationFinished(number, chunks * 4, "stop"))


def act(story: Story, number: int, incarnation: str) -> int:
    """An action; the sequence of its boundary."""
    story.write(T, started(number, incarnation))
    return story.write(T, committed(number), after_s=0.4)


def capture(story: Story, name: str, incarnation: str, number: int, sequence: int) -> None:
    story.take_over(BOX, "checkpointer")
    story.write(BOX, CheckpointStarted(name, incarnation, number, sequence))
    story.write(BOX, CheckpointPublished(name, incarnation, number, sequence, 4096, 0.02, 0.2))


def recovered(story: Story, failed: str, checkpoint: str, number: int, sequence: int, incarnation: str) -> None:
    """A sandbox failure and all of its recovery, with a rewind."""
    story.take_over(BOX, "detector")
    story.write(BOX, FailureDetected(failed, "died", "process 1 ended", "detector"))
    story.take_over(BOX, "recovery")
    story.write(BOX, RecoveryStarted(failed, "restore the sandbox", "recovery"))
    story.take_over(T, "recovery")
    story.write(T, RecoveryStarted(failed, f"restore {checkpoint}", "recovery"))
    story.write(BOX, restored(checkpoint, number, sequence, incarnation))
    story.write(T, Rewound(number, sequence, "its sandbox failed"), TrajectoryResumed(number, sequence, incarnation))
    story.take_over(T, "rollout")


def eventful() -> Story:
    """A finished run that saw everything: an engine's death, a sandbox's, a discarded checkpoint, a rewind."""
    story = underway()
    end(story)
    return story


def underway() -> Story:
    """The same run just before its trajectory finishes: after action 3 in box-2."""
    story = Story()
    story.take_over(RUN, "main")
    story.write(RUN, RunStarted("host", 10, 100, "everysec", "0.1.0"))
    story.write(RUN, WeightsPublished(1))
    story.take_over(ENGINE, "main")
    story.write(ENGINE, WorkerRegistered("w-1", "main", "host", 11, 110, "http://h:1", "r"), WorkerReady("w-1", 1))
    story.write(ENGINE, WorkerRegistered("w-2", "shadow", "host", 12, 120, "http://h:2", "r"), WorkerReady("w-2", 1))
    story.take_over(BOX, "rollout")
    story.write(BOX, SandboxCreated("box-1", "c1", "sha256:1", "host", 20, 200, "r", SandboxSpec("image")))
    story.take_over(T, "rollout")
    story.write(T, TrajectoryStarted("r", "repair the parser", pack_token_ids([1, 2, 3])))
    generate(story, 1)
    first = act(story, 1, "box-1")
    capture(story, "t-b1", "box-1", 1, first)
    generate(story, 2)
    second = act(story, 2, "box-1")
    story.take_over(BOX, "checkpointer")
    story.write(BOX, CheckpointStarted("t-b2", "box-1", 2, second))
    story.write(BOX, CheckpointDiscarded("t-b2", "an inotify handle"))
    generate(story, 3)
    story.write(T, started(3, "box-1"))
    recovered(story, "box-1", "t-b1", 1, first, "box-2")
    story.write(T, GenerationStarted(2, "w", "w-1"))
    story.write(T, chunk(2, 0, 4))
    story.take_over(ENGINE, "detector")
    story.write(ENGINE, FailureDetected("w-1", "died", "engine process ended", "detector"))
    story.take_over(ENGINE, "recovery")
    story.write(ENGINE, RecoveryStarted("w-1", "hand over to the shadow", "recovery"))
    story.write(ENGINE, HandoverCompleted("w-1", "w-2", 0.05), WorkerReady("w-2", 1))
    story.write(T, GenerationResumed(2, 4, "w", "w-2"))
    story.write(T, chunk(2, 4, 4))
    story.write(T, GenerationFinished(2, 8, "stop"))
    again = act(story, 2, "box-2")
    capture(story, "t-b2-again", "box-2", 2, again)
    generate(story, 3, "w-2")
    act(story, 3, "box-2")
    return story


def end(story: Story) -> None:
    """The trajectory finishes and everything is tidied up."""
    story.write(T, TrajectoryFinished("submitted", 1.0))
    story.take_over(BOX, "reaper")
    story.write(BOX, SandboxRemoved("box-2", "the trajectory is finished"))
    story.take_over(ENGINE, "reaper")
    story.write(ENGINE, WorkerRemoved("w-2", "run r is over"))
    story.write(RUN, RunFinished("done"))
