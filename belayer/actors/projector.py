"""Keeps folded states warm, so that looking at a stream costs only what is new on it.

Looking never takes an epoch: whoever then wants to act takes the stream over and decides on the fold that this gives.

A server that lost events (a crash in mode everysec, a failover) may have other ones in their place. What was kept warm
then does not hang together with what comes, so it is forgotten and the stream is read again from its start; only a
stream that is damaged in itself raises DamagedJournalError.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from belayer.errors import DamagedJournalError
from belayer.ids import StreamId
from belayer.journal.codec import Recorded
from belayer.journal.store import JournalStore
from belayer.journal.writer import Reader

S = TypeVar("S")
_KEPT = 4096


class _Warm(Generic[S]):
    def __init__(self, reader: Reader, state: S) -> None:
        self.reader = reader
        self.state = state
        self.lock = asyncio.Lock()


class Projector(Generic[S]):
    """The states of one kind of stream, by name; the least recently used are forgotten and read again on demand."""

    def __init__(
        self,
        store: JournalStore,
        stream: Callable[[str], StreamId],
        fold: Callable[[Iterable[Recorded], S], S],
        empty: S,
    ) -> None:
        self._store = store
        self._stream = stream
        self._fold = fold
        self._empty = empty
        self._warm: OrderedDict[str, _Warm[S]] = OrderedDict()

    async def look(self, name: str) -> S:
        """The state as of now."""
        warm = self._warm.get(name)
        if warm is None:
            warm = self._warm[name] = _Warm(Reader(self._store, self._stream(name), from_mark=True), self._empty)
            if len(self._warm) > _KEPT:
                self._warm.popitem(last=False)
        else:
            self._warm.move_to_end(name)
        async with warm.lock:
            try:
                warm.state = self._fold(await warm.reader.catch_up(), warm.state)
            except DamagedJournalError:
                warm.reader, warm.state = Reader(self._store, warm.reader.stream, from_mark=True), self._empty
                warm.state = self._fold(await warm.reader.catch_up(), warm.state)
        return warm.state
