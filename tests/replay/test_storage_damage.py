"""What storage can do to a journal: the audit finds exactly that, once, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from belayer.ids import StreamId
from belayer.journal.codec import Entry, digest_of
from belayer.journal.events import (
    CheckpointPublished,
    CheckpointStarted,
    EpochStarted,
    FailureDetected,
    GenerationFinished,
    GenerationStarted,
    HandoverCompleted,
    Rewound,
    RunStarted,
    TokensAppended,
    TrajectoryAborted,
    TrajectoryStarted,
)
from replay.audit import Report, audit
from replay.findings import Check
from tests.replay.journals import (
    BOX,
    ENGINE,
    RUN,
    SECOND,
    Story,
    T,
    committed,
    eventful,
)


def found(report: Report) -> list[tuple[str, Check]]:
    return [(finding.stream, finding.check) for finding in report.findings]


def drop(entries: list[Entry], at: int) -> None:
    del entries[at]


def twice(entries: list[Entry], at: int) -> None:
    entries.insert(at, entries[at])


def swap(entries: list[Entry], at: int) -> None:
    entries[at], entries[at + 1] = entries[at + 1], entries[at]


def flip_a_token(entries: list[Entry], at: int) -> None:
    entry = entries[at]
    body = bytearray(entry.body)
    body[body.index(b"\x01\x01\x01\x01") + 1] = 0
    entries[at] = Entry(entry.epoch, entry.last_sequence, entry.count, bytes(body))


def replace_with_a_stranger(entries: list[Entry], at: int) -> None:
    stranger = list(underway_with_other_times().encoded(T))[at]
    assert digest_of(stranger.body[1:]) != digest_of(entries[at].body[1:])
    entries[at] = stranger


def underway_with_other_times() -> Story:
    story = eventful()
    story.streams = {stream: [(t + SECOND, group) for t, group in appends] for stream, appends in story.streams.items()}
    return story


def lower_epoch(entries: list[Entry], at: int) -> None:
    entry = entries[at]
    entries[at] = Entry(entry.epoch - 1, entry.last_sequence, entry.count, entry.body)


def raise_epoch(entries: list[Entry], at: int) -> None:
    entry = entries[at]
    entries[at] = Entry(entry.epoch + 2, entry.last_sequence, entry.count, entry.body)


def flip_in_the_tag(entries: list[Entry], at: int) -> None:
    """It looks like an event of a newer version; but its writer is of this one."""
    entry = entries[at]
    body = entry.body.replace(b"generation-", b"generatioo-", 1).replace(b"tokens-", b"tokenr-", 1)
    assert body != entry.body
    entries[at] = Entry(entry.epoch, entry.last_sequence, entry.count, body)


def overwrite(entries: list[Entry], at: int) -> None:
    entry = entries[at]
    entries[at] = Entry(entry.epoch, entry.last_sequence, entry.count, b"\xc1" * len(entry.body))


@pytest.mark.parametrize(
    ("damage", "stream", "kind", "nth", "check"),
    [
        (drop, T, TokensAppended, 4, Check.SEQUENCE),
        (drop, T, GenerationFinished, 1, Check.SEQUENCE),
        (drop, T, type(committed(1)), 0, Check.SEQUENCE),
        (drop, T, Rewound, 0, Check.SEQUENCE),
        (drop, T, EpochStarted, 1, Check.SEQUENCE),
        (drop, T, TrajectoryStarted, 0, Check.SEQUENCE),
        (drop, BOX, CheckpointPublished, 0, Check.SEQUENCE),
        (drop, BOX, FailureDetected, 0, Check.SEQUENCE),
        (drop, ENGINE, HandoverCompleted, 0, Check.SEQUENCE),
        (drop, RUN, RunStarted, 0, Check.SEQUENCE),
        (twice, T, TokensAppended, 4, Check.SEQUENCE),
        (twice, T, type(committed(1)), 1, Check.SEQUENCE),
        (twice, BOX, CheckpointPublished, 0, Check.SEQUENCE),
        (swap, T, TokensAppended, 4, Check.SEQUENCE),
        (swap, BOX, FailureDetected, 0, Check.SEQUENCE),
        (flip_a_token, T, TokensAppended, 4, Check.DIGEST),
        (replace_with_a_stranger, T, TokensAppended, 4, Check.DIGEST),
        (replace_with_a_stranger, T, GenerationStarted, 1, Check.DIGEST),
        (lower_epoch, T, TokensAppended, 9, Check.EPOCH),
        (lower_epoch, BOX, CheckpointPublished, 1, Check.EPOCH),
        (raise_epoch, T, TokensAppended, 4, Check.EPOCH),
        (raise_epoch, BOX, CheckpointPublished, 0, Check.EPOCH),
        (overwrite, T, TokensAppended, 4, Check.ENCODING),
        (overwrite, BOX, CheckpointStarted, 0, Check.ENCODING),
        (flip_in_the_tag, T, TokensAppended, 4, Check.ENCODING),
        (flip_in_the_tag, T, GenerationFinished, 1, Check.ENCODING),
    ],
)
def test_storage(
    damage: Callable[[list[Entry], int], None], stream: StreamId, kind: type, nth: int, check: Check
) -> None:
    story = eventful()
    entries = list(story.encoded(stream))
    damage(entries, story.place(stream, kind, nth))
    journal = [(other, entry) for other, entry in story.entries() if other != stream]
    report = audit([*journal, *((stream, entry) for entry in entries)])
    assert found(report) == [(str(stream), check)]


def test_a_lost_end_cannot_be_seen_in_the_chain_but_in_what_others_say_of_it() -> None:
    """The last events of a stream have no event after them; the sandbox still names the lost boundaries."""
    story = eventful()
    boundary = story.place(T, type(committed(1)), 2)
    rest = [(stream, entry) for stream, entry in story.entries() if stream != T]
    kept = list(story.encoded(T))[:boundary]
    ended = Story({T: [*story.streams[T][:boundary], (story.now_ns, (TrajectoryAborted("lost"),))]})
    assert audit([*rest, *((T, entry) for entry in kept)]).findings == []
    assert (str(BOX), Check.CHECKPOINT) in found(audit([*rest, *ended.entries()]))
