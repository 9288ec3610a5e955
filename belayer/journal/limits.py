"""How much one writer may store, so that a loop in one rollout does not exhaust the server that all of them share.

Checked by the writer before anything is sent: after LimitError nothing was stored and the writer goes on. The defaults
are far above what rollouts do: an event of 8 MiB is a prompt of 2,000,000 tokens, a stream of 1 GiB are 100,000,000.
What ends or recovers a trajectory is always taken, so that a stream that is full can be closed. How much waits in one
process is bounded by `open_store(waiting_bytes=...)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from belayer.errors import LimitError
from belayer.ids import StreamId
from belayer.journal.codec import Entry, split_entry
from belayer.journal.events import (
    AnyEvent,
    FailureDetected,
    GenerationFinished,
    RecoveryStarted,
    Rewound,
    TrajectoryAborted,
    TrajectoryFinished,
    TrajectoryResumed,
    tag_of,
)

_ALWAYS = (
    GenerationFinished,
    TrajectoryFinished,
    TrajectoryAborted,
    FailureDetected,
    RecoveryStarted,
    Rewound,
    TrajectoryResumed,
)


@dataclass(frozen=True)
class Limits:
    """Bytes are of encoded events, as they are stored."""

    event_bytes: int = 8 << 20
    group_events: int = 1000
    group_bytes: int = 16 << 20
    stream_bytes: int = 1 << 30

    @cached_property
    def unquestioned_bytes(self) -> int:
        """An append of at most so many bytes is within all limits but the stream's."""
        return min(self.event_bytes, self.group_bytes)


LIMITS = Limits()


def check_group(limits: Limits, stream: StreamId, events: Sequence[AnyEvent]) -> None:
    """LimitError when one append has too many events; before they are encoded."""
    if len(events) > limits.group_events:
        raise LimitError(str(stream), "events in one append", limits.group_events, len(events), "append fewer at once")


def check_entry(limits: Limits, stream: StreamId, events: Sequence[AnyEvent], entry: Entry, stream_bytes: int) -> None:
    """LimitError when the append or one of its events is too large, or the stream would be, having `stream_bytes`.

    An entry of at most `unquestioned_bytes` in a stream that has room need not be asked about.
    """
    size_bytes = len(entry.body)
    if size_bytes > limits.event_bytes:
        sizes = [len(memoryview(raw)) for raw in split_entry(stream, entry.epoch, entry.last_sequence, entry.body)]
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        if sizes[largest] > limits.event_bytes:
            what = f"bytes of a {tag_of(events[largest])}"
            raise LimitError(str(stream), what, limits.event_bytes, sizes[largest], "shorten it, or split it")
    if size_bytes > limits.group_bytes:
        what = "bytes of one append"
        raise LimitError(str(stream), what, limits.group_bytes, size_bytes, "append fewer events at once")
    if stream_bytes + size_bytes > limits.stream_bytes and not all(isinstance(event, _ALWAYS) for event in events):
        what, got = "bytes of the stream", stream_bytes + size_bytes
        raise LimitError(str(stream), what, limits.stream_bytes, got, "end the trajectory; a longer one needs Limits")
