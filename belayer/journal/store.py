"""What a journal store must do. Two implementations: in memory (the reference) and Redis Streams.

Invariants that every implementation keeps, checked by one contract suite:
- an entry is stored whole or not at all, and once stored never changes;
- a stream's sequences run from 1 without gaps, its epochs never fall;
- an append of an epoch below the stream's current one is refused, for ever;
- an append is acknowledged only after the store has it as durably as its mode says;
- repeating an append whose reply was lost (same event ids, same place) succeeds and stores nothing twice;
- a noticed append puts its notice on the control stream in the same atomic step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from belayer.ids import StreamId, StreamKind
from belayer.journal.codec import Entry

if TYPE_CHECKING:
    from belayer.journal.packing import TokenForm
from belayer.journal.sealing import Keyring


class Notice(NamedTuple):
    """'Look at this stream': `tag` says what was appended to it. May come twice, late, or for nothing."""

    stream: StreamId
    tag: str
    delivery: str
    """The store's own handle of this delivery, for `Subscription.done`."""


class Loss(NamedTuple):
    """Acknowledged events that the server was found to have lost."""

    stream: StreamId
    epoch: int
    first_sequence: int
    last_sequence: int
    restored: bool
    """Whether they are stored again, byte for byte; if not, the stream has gone on without them, or what came before
    them is missing too."""
    time_ns: int


class Subscription(Protocol):
    """One consumer of a consumer group on the control streams: each notice goes to one consumer of the group."""

    async def next(self, timeout_s: float) -> Notice | None:
        """The next notice (a stale one of a dead consumer before a new one), or None when none came in time."""
        ...

    async def done(self, notice: Notice) -> None:
        """The notice needs no more work. A notice that is never done goes to another consumer once it is stale."""
        ...

    async def renew(self, notice: Notice) -> None:
        """The work on this notice goes on: it is not stale."""
        ...

    async def holders(self) -> Sequence[str]:
        """The consumers of the group that have notices which are not done, this one included."""
        ...

    async def inherit(self, consumer: str) -> None:
        """What that consumer, known to be dead, has left undone comes next here, stale or not."""
        ...


class JournalStore(Protocol):
    """Streams of entries. All but `durability` and `subscribe` are awaited.

    JournalUnavailableError when the store does not answer within its deadline.
    """

    @property
    def durability(self) -> str:
        """The named mode: memory, everysec, fsync or replicated."""
        ...

    @property
    def keyring(self) -> Keyring | None:
        """With what readers and writers of this store open and seal payloads; None: not at all."""
        ...

    @property
    def token_form(self) -> TokenForm:
        """How writers of this store keep token chunks; readers read all forms."""
        ...

    def append(self, stream: StreamId, entry: Entry, notice_tag: str | None = None) -> Awaitable[None]:
        """Store the entry right after `entry.expected_sequence`; with a tag, also put a notice on the control stream.

        FencedError: a higher epoch has the stream. WrongSequenceError: the stream is not at `entry.expected_sequence`.
        """
        ...

    def take_over(self, stream: StreamId, after: Entry | None, entry: Entry) -> Coroutine[Any, Any, Entry | None]:
        """Store `entry` (an EpochStarted of the next epoch) if `after` is still the stream's last entry.

        Returns None when done, else the entry that is the last one now; the caller builds its entry anew on that.
        `after` None: the stream must be empty. A repeat after a lost reply returns None.
        """
        ...

    def last(self, stream: StreamId) -> Coroutine[Any, Any, Entry | None]:
        """The stream's last entry, or None for an empty stream."""
        ...

    def read(self, stream: StreamId, after_sequence: int = 0, limit: int = 1000) -> Coroutine[Any, Any, list[Entry]]:
        """Up to `limit` entries that end after `after_sequence`, oldest first."""
        ...

    def wait(self, stream: StreamId, after_sequence: int, timeout_s: float) -> Coroutine[Any, Any, bool]:
        """True as soon as the stream is longer than `after_sequence`; False when it was not within the time."""
        ...

    def streams(self, kind: StreamKind | None = None) -> Coroutine[Any, Any, Sequence[StreamId]]:
        """All streams that exist, sorted; of one kind when given."""
        ...

    def trim(self, stream: StreamId, first: Entry) -> Coroutine[Any, Any, None]:
        """Drop the entries before `first` when the stream has exactly it; else nothing. Its last entry always stays.

        For the archiver, once what is dropped is durable elsewhere; nobody else.
        """
        ...

    def remove(self, stream: StreamId) -> Coroutine[Any, Any, None]:
        """Remove the stream and its name. For the owner of a finished run, after archiving; nobody else."""
        ...

    def losses(self) -> Coroutine[Any, Any, Sequence[Loss]]:
        """Acknowledged events that servers were found to have lost, oldest first; what was restored is there again."""
        ...

    def subscribe(
        self, group: str, consumer: str, stale_after_s: float = 5.0
    ) -> AbstractAsyncContextManager[Subscription]:
        """Join the consumer group. Notices from before the group existed are delivered too."""
        ...

    def close(self) -> Coroutine[Any, Any, None]:
        """Let go of the connection. Acknowledged appends are safe; waiting ones fail."""
        ...
