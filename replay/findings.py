"""What an audit says: where, which check, and what is wrong, in words.

Findings are collected, never raised. A stream gives at most `PER_STREAM` of them, so that a journal which is wrong
everywhere does not fill the memory; the last one then says that there were more.
"""

from __future__ import annotations

import enum

import msgspec

PER_STREAM = 100


class Check(enum.StrEnum):
    """The kinds of damage that the audit tells apart."""

    SEQUENCE = "sequence"
    """Events are missing, come twice or come out of order."""
    DIGEST = "digest"
    """An event was changed or replaced after it had been written."""
    EPOCH = "epoch"
    """A fenced writer wrote, or an epoch began without saying so."""
    ENCODING = "encoding"
    """Stored bytes are no event."""
    SEALED = "sealed"
    """A payload that does not open with the key of its name, or opens to something else than its columns."""
    FOREIGN = "foreign"
    """An event in a stream of another kind."""
    LIFECYCLE = "lifecycle"
    """Started or finished twice, or something happened before the start or after the end."""
    GENERATION = "generation"
    """A generation out of its turn, or token chunks that overlap, leave a hole or differ in their columns."""
    BOUNDARY = "boundary"
    """A generation while an action had no outcome, or an action before its generation was finished."""
    ACTION = "action"
    """An action twice or out of its turn on the live branch."""
    REWIND = "rewind"
    """A rewind to something that is no boundary of the live branch."""
    SUPERSEDED = "superseded"
    """Something of a superseded branch reached the live one."""
    RECOVERY = "recovery"
    """A recovery that was not started, or never completed."""
    ENVIRONMENT = "environment"
    """An action ran in a sandbox that did not stand where the context stood."""
    CHECKPOINT = "checkpoint"
    """A checkpoint of something else than a committed boundary, or published without its intent."""
    RESTORE = "restore"
    """A restore of a checkpoint that was not published, was discarded, or was not on the live branch."""
    ENGINE = "engine"
    """An engine incarnation that nobody registered, or a handover to one that could not serve."""


class Finding(msgspec.Struct, frozen=True, order=True):
    """One thing that is wrong. `sequence` is the event at which it shows."""

    stream: str
    sequence: int
    check: Check
    message: str


class Findings:
    """The findings of one stream."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.found: list[Finding] = []

    def add(self, sequence: int, check: Check, message: str) -> None:
        """Note a finding; beyond `PER_STREAM` only that there are more."""
        if len(self.found) > PER_STREAM:
            return
        if len(self.found) == PER_STREAM:
            message = f"there are more findings in this stream than the {PER_STREAM} above; the first ones count most"
        self.found.append(Finding(self.stream, sequence, check, message))
