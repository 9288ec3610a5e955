"""The journal in memory: the reference that every other store is compared with, and what tests build on.

It does exactly what `belayer.journal.store` promises and loses everything with its process. All methods act at once,
so between two awaits of the caller nothing is ever half done.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from belayer.ids import StreamId, StreamKind
from belayer.journal.codec import Entry
from belayer.journal.outcome import is_above, refusal, takeover_refusal
from belayer.journal.packing import TokenForm
from belayer.journal.sealing import Keyring
from belayer.journal.store import Loss, Notice


class MemoryStore:
    """A JournalStore without a server. `clock` (seconds) decides when a notice is stale."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        keyring: Keyring | None = None,
        token_form: TokenForm = "plain",
    ) -> None:
        self._streams: dict[StreamId, list[Entry]] = {}
        self._control = _Control(clock)
        self.keyring = keyring
        self.token_form: TokenForm = token_form

    @property
    def durability(self) -> str:
        return "memory"

    async def append(self, stream: StreamId, entry: Entry, notice_tag: str | None = None) -> None:
        entries = self._streams.get(stream, [])
        last = entries[-1] if entries else None
        if not is_above(entry, last) and entry in entries:
            return
        if not is_above(entry, last) or entry.expected_sequence != (last.last_sequence if last else 0):
            raise refusal(stream, entry, last)
        self._streams.setdefault(stream, entries).append(entry)
        if notice_tag is not None:
            self._control.notices.append((stream, notice_tag))
        self._control.wake()

    async def take_over(self, stream: StreamId, after: Entry | None, entry: Entry) -> Entry | None:
        last = await self.last(stream)
        if last == entry:
            return None
        if last != after:
            if error := takeover_refusal(stream, after, last):
                raise error
            return last
        self._streams.setdefault(stream, []).append(entry)
        self._control.wake()
        return None

    async def last(self, stream: StreamId) -> Entry | None:
        entries = self._streams.get(stream)
        return entries[-1] if entries else None

    async def read(self, stream: StreamId, after_sequence: int = 0, limit: int = 1000) -> list[Entry]:
        entries = self._streams.get(stream, [])
        first = bisect.bisect_right(entries, after_sequence, key=lambda entry: entry.last_sequence)
        return entries[first : first + limit]

    async def wait(self, stream: StreamId, after_sequence: int, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while (last := await self.last(stream)) is None or last.last_sequence <= after_sequence:
            if not await self._control.change(deadline - time.monotonic()):
                return False
        return True

    async def streams(self, kind: StreamKind | None = None) -> Sequence[StreamId]:
        return sorted(stream for stream in self._streams if kind in (None, stream.kind))

    async def trim(self, stream: StreamId, first: Entry) -> None:
        entries = self._streams.get(stream, [])
        if first in entries:
            del entries[: entries.index(first)]

    async def remove(self, stream: StreamId) -> None:
        self._streams.pop(stream, None)

    async def losses(self) -> list[Loss]:
        return []

    @asynccontextmanager
    async def subscribe(self, group: str, consumer: str, stale_after_s: float = 5.0) -> AsyncGenerator[_Subscription]:
        joined = self._control.groups.setdefault(group, _Group())
        yield _Subscription(self._control, joined, consumer, stale_after_s)

    async def close(self) -> None:
        """Nothing to let go of: what was appended stays for as long as the object."""


@dataclass
class _Group:
    """A consumer group: how many notices were delivered, and which of them wait for `done`: (consumer, since)."""

    delivered: int = 0
    pending: dict[int, tuple[str, float]] = field(default_factory=dict[int, tuple[str, float]])


class _Control:
    """The control stream with its groups, and whoever waits for anything to change."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.notices: list[tuple[StreamId, str]] = []
        self.groups: dict[str, _Group] = {}
        self._waiting: set[asyncio.Future[None]] = set()

    def take(self, group: _Group, consumer: str, stale_after_s: float) -> Notice | None:
        """The next notice for the consumer: the oldest stale one, else the next new one, else None."""
        now = self.clock()
        stale = (number for number, (_, since_s) in group.pending.items() if now - since_s >= stale_after_s)
        number = next(stale, group.delivered)
        if number == len(self.notices):
            return None
        group.delivered = max(group.delivered, number + 1)
        group.pending[number] = (consumer, now)
        stream, tag = self.notices[number]
        return Notice(stream, tag, str(number))

    def wake(self) -> None:
        """Something was appended."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    async def change(self, timeout_s: float) -> bool:
        """True as soon as anything was appended, False when nothing was within the time."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await waiting
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(waiting)
        return True


class _Subscription:
    def __init__(self, control: _Control, group: _Group, consumer: str, stale_after_s: float) -> None:
        self._control = control
        self._group = group
        self._consumer = consumer
        self._stale_after_s = stale_after_s

    async def next(self, timeout_s: float) -> Notice | None:
        deadline = time.monotonic() + timeout_s
        while (notice := self._control.take(self._group, self._consumer, self._stale_after_s)) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            await self._control.change(min(left_s, self._stale_after_s / 4))
        return notice

    async def done(self, notice: Notice) -> None:
        self._group.pending.pop(int(notice.delivery), None)

    async def renew(self, notice: Notice) -> None:
        number = int(notice.delivery)
        if number in self._group.pending:
            self._group.pending[number] = (self._consumer, self._control.clock())

    async def holders(self) -> Sequence[str]:
        return sorted({consumer for consumer, _ in self._group.pending.values()})

    async def inherit(self, consumer: str) -> None:
        left = {number: (consumer, -math.inf) for number, (who, _) in self._group.pending.items() if who == consumer}
        self._group.pending |= left
        self._control.wake()
