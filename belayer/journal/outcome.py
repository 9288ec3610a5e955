"""What an append or a takeover came to, decided from what the stream holds. Pure; shared by all stores.

An entry that is stored byte for byte at its id is ours: its event ids are random. So 'was my lost append stored?' has
one answer whoever asks, however often, and whatever was appended since.
"""

from __future__ import annotations

from belayer.errors import DamagedJournalError, FencedError, JournalError, WrongSequenceError
from belayer.ids import StreamId
from belayer.journal.codec import Entry, decode_entry


def is_above(entry: Entry, last: Entry | None) -> bool:
    """Whether the entry's id is above the stream's last one, the condition that Redis puts on an XADD."""
    return last is None or (entry.epoch, entry.last_sequence) > (last.epoch, last.last_sequence)


def refusal(stream: StreamId, entry: Entry, last: Entry | None) -> JournalError:
    """Why an entry that is not in the stream may not be appended after `last`."""
    if last is not None and last.epoch > entry.epoch:
        return FencedError(str(stream), entry.epoch, last.epoch)
    return WrongSequenceError(str(stream), entry.expected_sequence, 0 if last is None else last.last_sequence)


def takeover_refusal(stream: StreamId, after: Entry | None, last: Entry | None) -> JournalError | None:
    """Why a takeover can never succeed that was built on `after`, or None when `last` has only moved on from there.

    An entry that somebody has read and that is gone or another one now means that the server lost acknowledged events.
    """
    if after is None or (last is not None and last.last_sequence > after.last_sequence):
        return None
    if last is None or last.last_sequence < after.last_sequence:
        return WrongSequenceError(str(stream), after.last_sequence, 0 if last is None else last.last_sequence)
    return forked(stream, after.last_sequence)


def check_chain(stream: StreamId, entry: Entry, last: Entry | None) -> JournalError | None:
    """None when the entry continues `last`, by sequence and by digest; else why it may not be appended."""
    if not is_above(entry, last) or entry.expected_sequence != (0 if last is None else last.last_sequence):
        return refusal(stream, entry, last)
    if last is None:
        return None
    ours = decode_entry(stream, entry.epoch, entry.last_sequence, entry.body)[0].previous_digest
    theirs = decode_entry(stream, last.epoch, last.last_sequence, last.body)[-1].digest
    return None if ours == theirs else forked(stream, last.last_sequence)


def forked(stream: StreamId, sequence: int) -> DamagedJournalError:
    return DamagedJournalError(
        str(stream), sequence, "another event is stored here than the writer knows: the server lost acknowledged events"
    )
