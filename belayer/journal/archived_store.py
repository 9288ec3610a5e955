"""A journal whose finished streams are in an archive: readers see one history, wherever its parts are.

Only reading differs from the store underneath: where a stream on the server begins with the archive's mark, what comes
before the mark is read from the archive. A stream that is not archived costs nothing more. Invariant: the archive's
entries are the very bytes that the server had, so the digest chain goes through from one to the other, and readers
check it as always.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from belayer.ids import StreamId, StreamKind
from belayer.journal.archive import Archive
from belayer.journal.codec import Entry, decode_entry
from belayer.journal.packing import TokenForm
from belayer.journal.sealing import Keyring
from belayer.journal.store import JournalStore, Loss, Subscription
from belayer.journal.writer import mark_of


class ArchivedStore:
    """A JournalStore over another one and an archive. Closing it closes the store."""

    def __init__(self, live: JournalStore, archive: Archive) -> None:
        self.live = live
        self.archive = archive

    @property
    def keyring(self) -> Keyring | None:
        return self.live.keyring

    @property
    def token_form(self) -> TokenForm:
        return self.live.token_form

    @property
    def durability(self) -> str:
        return self.live.durability

    async def read(self, stream: StreamId, after_sequence: int = 0, limit: int = 1000) -> list[Entry]:
        entries: list[Entry] = []
        while more := await self._page(stream, after_sequence, limit - len(entries)):
            entries += more
            after_sequence = entries[-1].last_sequence
            if len(entries) == limit:
                break
        return entries

    async def _page(self, stream: StreamId, after_sequence: int, limit: int) -> list[Entry]:
        """Some of what comes next; nothing only when there is no more."""
        entries = await self.live.read(stream, after_sequence, limit)
        if not entries or (first := entries[0]).expected_sequence <= after_sequence:
            return entries
        mark = mark_of(decode_entry(stream, first.epoch, first.last_sequence, first.body))
        if mark is None or mark.through_sequence <= after_sequence:
            return entries
        return await self.archive.read(stream, mark, after_sequence, limit)

    def append(self, stream: StreamId, entry: Entry, notice_tag: str | None = None) -> Awaitable[None]:
        return self.live.append(stream, entry, notice_tag)

    def take_over(self, stream: StreamId, after: Entry | None, entry: Entry) -> Coroutine[Any, Any, Entry | None]:
        return self.live.take_over(stream, after, entry)

    def last(self, stream: StreamId) -> Coroutine[Any, Any, Entry | None]:
        return self.live.last(stream)

    def wait(self, stream: StreamId, after_sequence: int, timeout_s: float) -> Coroutine[Any, Any, bool]:
        return self.live.wait(stream, after_sequence, timeout_s)

    def streams(self, kind: StreamKind | None = None) -> Coroutine[Any, Any, Sequence[StreamId]]:
        return self.live.streams(kind)

    def trim(self, stream: StreamId, first: Entry) -> Coroutine[Any, Any, None]:
        return self.live.trim(stream, first)

    def remove(self, stream: StreamId) -> Coroutine[Any, Any, None]:
        return self.live.remove(stream)

    def losses(self) -> Coroutine[Any, Any, Sequence[Loss]]:
        return self.live.losses()

    def subscribe(
        self, group: str, consumer: str, stale_after_s: float = 5.0
    ) -> AbstractAsyncContextManager[Subscription]:
        return self.live.subscribe(group, consumer, stale_after_s)

    def close(self) -> Coroutine[Any, Any, None]:
        return self.live.close()
