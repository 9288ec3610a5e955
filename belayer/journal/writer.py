"""A stream's one writer at a time: takes the epoch over, then appends at the sequence and digest that it knows.

Once FencedError or WrongSequenceError was raised the writer is finished: whoever holds it reads the stream again.
After JournalUnavailableError the outcome of that append is unknown; `append` may be called again with nothing new
(`retry`), which stores the same event ids at the same place, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable

from belayer import __version__
from belayer.errors import (
    ArchivedError,
    CodecError,
    DamagedJournalError,
    FencedError,
    JournalError,
    ProtocolError,
    UnknownEventError,
    WrongSequenceError,
)
from belayer.ids import StreamId, new_event_id
from belayer.journal.codec import GENESIS, Entry, Recorded, decode_entry, encode_entry, encode_event
from belayer.journal.events import NOTICED, AnyEvent, EpochStarted, StreamArchived, readable, tag_of
from belayer.journal.limits import LIMITS, Limits, check_entry, check_group
from belayer.journal.packing import packed
from belayer.journal.store import JournalStore
from belayer.observe import steps
from belayer.observe.position import at

READ_AGAIN_S = 10.0
READ_AGAIN_PAUSE_S = 0.02
_READ_LIMIT = 1000
_NOTICED = frozenset(NOTICED)


class Reader:
    """Reads a stream forward and checks that each event follows the one before: sequence, epoch and digest.

    Sealed payloads are opened with the store's keyring; without one, sealed events come as they are.
    """

    def __init__(self, store: JournalStore, stream: StreamId, *, from_mark: bool = False) -> None:
        """`from_mark`: as actors read, who need no payloads: where the stream's beginning was archived, begin with what
        the server still has, and of sealed events take the readable part."""
        self._store = store
        self.stream = stream
        self._from_mark = from_mark
        self.epoch = 0
        self.sequence = 0
        self.digest: bytes = GENESIS
        self.last_entry: Entry | None = None
        self.writer_version = ""
        """The Belayer that writes under this epoch, as far as it has said."""
        self.size_bytes = 0
        """Of all entries read, as they are stored."""
        self._ready: list[Recorded] = []
        """Read by a `catch_up` that was broken off; the next one begins with it."""

    async def catch_up(self) -> list[Recorded]:
        """All events since the last call that succeeded. DamagedJournalError when they do not hang together."""
        at(self)
        while entries := await self._store.read(self.stream, self.sequence, _READ_LIMIT):
            for entry in entries:
                self._ready += self.accept(entry)
            if len(entries) < _READ_LIMIT:
                break
        events, self._ready = self._ready, []
        return events

    async def wait(self, timeout_s: float) -> bool:
        """True as soon as there is something to catch up with."""
        with steps.step("wait", stream=str(self.stream), sequence=self.sequence):
            return await self._store.wait(self.stream, self.sequence, timeout_s)

    def accept(self, entry: Entry) -> list[Recorded]:
        """The events of the next entry. DamagedJournalError when it does not follow; ArchivedError when only the
        archive has what comes before it. After an error the reader is where it was."""
        try:
            events = decode_entry(self.stream, entry.epoch, entry.last_sequence, entry.body)
        except UnknownEventError as error:
            raise error.by(self.writer_version if entry.epoch == self.epoch else "") from None
        epoch, sequence, digest, version = self.epoch, self.sequence, self.digest, self.writer_version
        for event in events:
            if event.sequence != sequence + 1:
                if (mark := mark_of(events)) is None or mark.through_sequence <= sequence:
                    raise DamagedJournalError(str(self.stream), event.sequence, f"follows sequence {sequence}")
                if not self._from_mark:
                    raise ArchivedError(str(self.stream), mark.through_sequence, mark.segment)
                epoch, digest = event.epoch, event.previous_digest
            if event.epoch < epoch:
                raise DamagedJournalError(str(self.stream), event.sequence, f"epoch fell to {event.epoch}")
            if event.previous_digest != digest:
                raise DamagedJournalError(str(self.stream), event.sequence, "the digest of the event before differs")
            epoch, sequence, digest = event.epoch, event.sequence, event.digest
            if isinstance(event.event, EpochStarted):
                version = event.event.belayer_version
        if self._from_mark:
            events = [recorded._replace(event=readable(recorded.event)) for recorded in events]
        elif (keyring := self._store.keyring) is not None:
            events = [keyring.open(recorded) for recorded in events]
        self.epoch, self.sequence, self.digest, self.writer_version = epoch, sequence, digest, version
        self.last_entry = entry
        self.size_bytes += len(entry.body)
        return events


def mark_of(events: Iterable[Recorded]) -> StreamArchived | None:
    """The archive's mark in an entry, if it is one."""
    return next((recorded.event for recorded in events if isinstance(recorded.event, StreamArchived)), None)


def check_archived(stream: StreamId, after_sequence: int, first: Entry) -> None:
    """ArchivedError when what should come between `after_sequence` and the entry is in an archive that was not read."""
    if first.expected_sequence > after_sequence:
        mark = mark_of(decode_entry(stream, first.epoch, first.last_sequence, first.body))
        if mark is not None and mark.through_sequence > after_sequence:
            raise ArchivedError(str(stream), mark.through_sequence, mark.segment)


async def read_events(store: JournalStore, stream: StreamId) -> AsyncIterator[Recorded]:
    """All events of a stream that exist now, checked, in bounded memory."""
    reader = Reader(store, stream)
    while events := await reader.catch_up():
        for event in events:
            yield event


async def version_of(store: JournalStore, stream: StreamId, epoch: int) -> str:
    """The Belayer that writes under the epoch, or nothing. For a message: it reads the whole stream."""
    sequence = 0
    while entries := await store.read(stream, sequence, _READ_LIMIT):
        for entry in entries:
            if entry.epoch == epoch:
                with contextlib.suppress(CodecError):
                    for recorded in decode_entry(stream, epoch, entry.last_sequence, entry.body):
                        if isinstance(recorded.event, EpochStarted):
                            return recorded.event.belayer_version
        sequence = entries[-1].last_sequence
    return ""


class StreamWriter:
    """Appends to one stream under one epoch. Made by `take_over`."""

    def __init__(
        self,
        store: JournalStore,
        stream: StreamId,
        epoch: int,
        sequence: int,
        digest: bytes,
        *,
        stream_bytes: int = 0,
        limits: Limits = LIMITS,
    ) -> None:
        """`stream_bytes`: what the stream has already."""
        self._store = store
        self.stream = stream
        self.epoch = epoch
        self.sequence: int = sequence
        self._digest = digest
        self._uncertain: Entry | None = None
        self._notice: str | None = None
        self._stream_bytes = stream_bytes
        self._limits = limits

    async def append(self, *events: AnyEvent, time_ns: int | None = None) -> int:
        """Store the events as one atomic group; the sequence of the last. Returns once they are durable as said.

        LimitError when they are too many or too large: nothing has happened then.
        """
        if self._uncertain is not None:
            raise ProtocolError(f"{self.stream}: an earlier append has no known outcome; call retry() first")
        now_ns = time.time_ns() if time_ns is None else time_ns
        said = events
        if (keyring := self._store.keyring) is not None:
            events = tuple(keyring.seal(self.stream, event) for event in events)
        form = self._store.token_form
        if len(events) == 1:
            event = events[0] if form == "plain" else packed(events[0], form)
            entry = encode_event(self.epoch, self.sequence, self._digest, event, new_event_id(), now_ns)
        else:
            check_group(self._limits, self.stream, events)
            event_ids = [new_event_id() for _ in events]
            stored = [packed(event, form) for event in events]
            entry, _ = encode_entry(self.epoch, self.sequence, self._digest, stored, event_ids, now_ns)
        size_bytes, limits = len(entry.body), self._limits
        if size_bytes > limits.unquestioned_bytes or self._stream_bytes + size_bytes > limits.stream_bytes:
            check_entry(limits, self.stream, said, entry, self._stream_bytes)
        self._notice = None
        for event in said:
            if type(event) in _NOTICED:
                self._notice = tag_of(event)
                break
        self._uncertain = entry
        if steps.observers:
            with steps.step("append", stream=str(self.stream), epoch=self.epoch, sequence=entry.last_sequence):
                await self._store.append(self.stream, entry, self._notice)
        else:
            await self._store.append(self.stream, entry, self._notice)
        self._stored(entry)
        return entry.last_sequence

    async def check_epoch(self) -> None:
        """FencedError if a later writer has the stream; costs a round trip, stores nothing."""
        last = await self._store.last(self.stream)
        if last is not None and last.epoch > self.epoch:
            raise FencedError(str(self.stream), self.epoch, last.epoch)

    async def retry(self) -> int:
        """Settle an append whose outcome is unknown: store it if it was not. The sequence of the last event."""
        if (entry := self._uncertain) is not None:
            with steps.step("append", stream=str(self.stream), epoch=self.epoch, sequence=entry.last_sequence):
                await self._store.append(self.stream, entry, self._notice)
            self._stored(entry)
        return self.sequence

    def _stored(self, entry: Entry) -> None:
        self.sequence, self._digest, self._uncertain = entry.last_sequence, entry.digest, None
        self._stream_bytes += len(entry.body)


async def take_over(
    store: JournalStore,
    stream: StreamId,
    writer: str,
    *,
    only_at: int | None = None,
    reader: Reader | None = None,
    limits: Limits = LIMITS,
    new_id: Callable[[], bytes] = new_event_id,
) -> tuple[StreamWriter, list[Recorded]]:
    """Start the next epoch of a stream, fencing off every earlier writer; the new writer and all events to fold.

    The events end with our own EpochStarted, so nothing can have come in between that the caller does not see.
    With `only_at` the stream is taken only while that is its last sequence, so that nobody who came first is fenced
    off; otherwise WrongSequenceError and nothing has happened. With a `reader` of the stream only the events that it
    has not read yet come back.

    What was read may be gone by then: events that were not acknowledged yet, or that a server lost; they may even come
    back, and a primary that was replaced may still tell of them. The stream is then read again, for up to READ_AGAIN_S,
    unless it was a `reader` of the caller's; then it is WrongSequenceError or DamagedJournalError.
    """
    deadline = time.monotonic() + READ_AGAIN_S
    while True:
        using = reader or Reader(store, stream)
        try:
            return await _take_over(store, stream, writer, only_at, using, limits, new_id)
        except _GoneError as gone:
            if reader is not None or time.monotonic() > deadline:
                raise gone.error from None
        except DamagedJournalError:
            if reader is not None or await _is_still_there(store, using):
                raise
        await asyncio.sleep(READ_AGAIN_PAUSE_S)


class _GoneError(Exception):
    """What a takeover was built on is not in the stream now; `error` says so to the caller."""

    def __init__(self, error: JournalError) -> None:
        super().__init__(error)
        self.error = error


async def _is_still_there(store: JournalStore, reader: Reader) -> bool:
    """Whether the last entry that was read is still in the stream."""
    if (entry := reader.last_entry) is None:
        return True
    return entry in await store.read(reader.stream, entry.expected_sequence, 1)


async def _take_over(
    store: JournalStore,
    stream: StreamId,
    writer: str,
    only_at: int | None,
    reader: Reader,
    limits: Limits,
    new_id: Callable[[], bytes],
) -> tuple[StreamWriter, list[Recorded]]:
    history = await reader.catch_up()
    while True:
        if only_at is not None and reader.sequence != only_at:
            raise WrongSequenceError(str(stream), only_at, reader.sequence)
        epoch = reader.epoch + 1
        started = EpochStarted(epoch, writer, __version__)
        entry, digest = encode_entry(epoch, reader.sequence, reader.digest, [started], [new_id()], time.time_ns())
        try:
            now = await store.take_over(stream, reader.last_entry, entry)
        except (WrongSequenceError, DamagedJournalError) as error:
            raise _GoneError(error) from None
        if now is None:
            history += decode_entry(stream, epoch, entry.last_sequence, entry.body)
            size_bytes = reader.size_bytes + len(entry.body)
            made = StreamWriter(
                store, stream, epoch, entry.last_sequence, digest, stream_bytes=size_bytes, limits=limits
            )
            at(made)
            return made, history
        history += await reader.catch_up()


def events_of(history: Iterable[Recorded]) -> list[AnyEvent]:
    """Only the events, for callers that need nothing else."""
    return [recorded.event for recorded in history]
