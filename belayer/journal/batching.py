"""The lane: all writes of one shard travel together, as many as are waiting in each round trip.

Invariants:
- group commit: while groups are under way new writes wait, and go together into the next one;
- a stream has at most one write under way, so its writes stay in order;
- what waits is bounded in bytes: callers then wait for room, nothing is dropped.

When the link breaks, every write under way is looked up before it is sent again, so it is stored once
(`belayer.journal.sending`). A write that has not come through by its deadline fails with JournalUnavailableError, and
whether it took effect is unknown. A caller that is cancelled: a write that still waits is not sent; one that is under
way may be stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Coroutine
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from belayer.errors import JournalUnavailableError
from belayer.ids import StreamId
from belayer.journal.codec import Entry
from belayer.journal.durability import Durability
from belayer.journal.keys import Keys
from belayer.journal.link import LONGEST_PAUSE_S, LinkLostError, once_ready
from belayer.journal.replies import Again
from belayer.journal.sending import Sender
from belayer.journal.server import REPLY_S
from belayer.journal.writes import Append, TakeOver

GROUPS = 2
"""Groups under way at once, of half the writes each: we encode one while the server works on the other."""
GROUP_BYTES = 1 << 17
GROUP_WRITES = 512
WAITING_BYTES = 64 << 20
LOOK_AFTER_S = 1.0
"""How often a lane looks whether what it holds is still there, when nothing is sent."""
_LEAST_ATTEMPT_S = 0.1


class Lane:
    """The writes of one shard. `start` it in the event loop that uses it; `close` it at the end."""

    def __init__(self, sender: Sender, keys: Keys, timeout_s: float, waiting_bytes: int = WAITING_BYTES) -> None:
        self._sender = sender
        self._keys = keys
        self._timeout_s = timeout_s
        self._parts = 1 if sender.durability is Durability.FSYNC else GROUPS
        """What there is goes in so many groups; in one where a sync of the disk, which serves a group, takes longer."""
        self._most_waiting_bytes = waiting_bytes
        self.waiting_bytes = 0
        self._queue: deque[Append] = deque()
        self._under_way: dict[bytes, Append] = {}
        self._room = asyncio.Event()
        self._ready = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed: str | None = "the store is not open"
        """Why nothing is sent any more."""
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Connect once, so that a wrong address or an unfit server shows here, and begin to send.

        A server that still loads its data, or a failover that is under way, is waited for.
        """
        started = time.monotonic()
        try:
            await once_ready(self._timeout_s)(self._sender.linked, min(self._timeout_s, REPLY_S))
        except LinkLostError as error:
            raise self._unavailable(started, error.cause) from None
        self._loop = asyncio.get_running_loop()
        self._tasks = [self._loop.create_task(self._run(), name="belayer-lane") for _ in range(GROUPS)]
        self._tasks.append(self._loop.create_task(self._look_after(), name="belayer-lane-held"))
        for task in self._tasks:
            task.add_done_callback(self._ended)
        self._closed = None

    async def close(self) -> None:
        """Stop sending. Writes that wait or are under way fail."""
        self._fail_all("the store is closed")
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._under_way.clear()
        self.waiting_bytes = 0
        self._sender.close()

    def append(self, stream: StreamId, entry: Entry, notice_tag: str | None) -> Awaitable[Any]:
        """Store the entry; to be awaited until it is as durable as the mode says.

        No coroutine, because that would cost every append a tenth of its time.
        """
        key = self._keys.stream(stream)
        write = Append(stream, key, entry, len(entry.body), time.monotonic(), self._new_future(), notice_tag)
        return self._submit(write) if self._has_room(write) else self._submit_later(write)

    def take_over(self, stream: StreamId, after: Entry | None, entry: Entry) -> Coroutine[Any, Any, Entry | None]:
        """Store the entry if `after` is the last one; None when done, else the entry that is last."""
        key = self._keys.stream(stream)
        write = TakeOver(stream, key, entry, len(entry.body), time.monotonic(), self._new_future(), after=after)
        return self._submit_later(write)

    def _new_future(self) -> asyncio.Future[Entry | None]:
        if self._loop is None:
            raise self._unavailable(time.monotonic(), self._closed or "")
        return self._loop.create_future()

    def _submit(self, write: Append) -> asyncio.Future[Entry | None]:
        if self._closed is not None:
            raise self._unavailable(write.started, self._closed)
        self.waiting_bytes += write.size_bytes
        self._queue.append(write)
        if not self._ready.is_set():
            self._ready.set()
        return write.done

    async def _submit_later(self, write: Append) -> Entry | None:
        if not self._has_room(write):
            await self._wait_for_room(write)
        return await self._submit(write)

    def _has_room(self, write: Append) -> bool:
        """A write that is larger than all the room there is goes alone."""
        return not self.waiting_bytes or self.waiting_bytes + write.size_bytes <= self._most_waiting_bytes

    async def _wait_for_room(self, write: Append) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._closed is None and not self._has_room(write):
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            raise self._unavailable(write.started, f"{self.waiting_bytes} bytes are waiting already") from None

    # --- the tasks that send ----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._ready.wait()
            if group := self._next_group():
                await self._settle(group)
                self._release(group)

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(LOOK_AFTER_S)
            await self._sender.look_after(REPLY_S)

    def forget(self, stream: StreamId) -> None:
        """The stream is removed: what is held of it is not stored again when the server loses it."""
        self._sender.forget(self._keys.stream(stream))

    def _next_group(self) -> list[Append]:
        """Take what waits, in order, up to the limits; nothing of a stream that has a write under way."""
        queue, under_way = self._queue, self._under_way
        share = min(GROUP_WRITES, -(-(len(queue) + len(under_way)) // self._parts))
        group: list[Append] = []
        later: list[Append] = []
        size_bytes = 0
        while queue and size_bytes < GROUP_BYTES and len(group) < share:
            write = queue.popleft()
            if write.done.done():
                self.waiting_bytes -= write.size_bytes
                self._room.set()
            elif write.key in under_way:
                later.append(write)
            else:
                under_way[write.key] = write
                group.append(write)
                size_bytes += write.size_bytes
        queue.extendleft(reversed(later))
        if not queue or not group:
            self._ready.clear()
        return group

    async def _settle(self, group: list[Append]) -> None:
        """Try until every write of the group is stored, refused or past its deadline."""
        if not (left := await self._try(group)):
            return
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(Again),
            wait=wait_random_exponential(multiplier=0.01, max=LONGEST_PAUSE_S),
        )
        async for attempt in retrying:
            with attempt:
                if left := await self._try(left):
                    raise Again("some are left")

    async def _try(self, group: list[Append]) -> list[Append]:
        """One attempt; the writes that are to be tried again."""
        left_s = max(_LEAST_ATTEMPT_S, min(write.started for write in group) + self._timeout_s - time.monotonic())
        cause = "no reply in time"
        with contextlib.suppress(TimeoutError):  # an attempt may connect and look before it sends
            async with asyncio.timeout(left_s + _LEAST_ATTEMPT_S):
                cause = await self._sender.attempt(group, min(REPLY_S, left_s))
        if not [write for write in group if not write.done.done()]:
            return []
        self._expire(cause)
        return [write for write in group if not write.done.done()]

    def _release(self, group: list[Append]) -> None:
        """The group is settled: its streams may go on, and there is room again."""
        for write in group:
            del self._under_way[write.key]
            self.waiting_bytes -= write.size_bytes
        if self._queue:
            self._ready.set()
        self._room.set()

    # --- ends -------------------------------------------------------------------------------------------------------

    def _expire(self, cause: str) -> None:
        now = time.monotonic()
        for write in (*self._under_way.values(), *self._queue):
            if now - write.started >= self._timeout_s and not write.done.done():
                write.settle(self._unavailable(write.started, cause))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A sending task ends only when it is cancelled; anything else is a bug of ours, and nobody waits for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail_all(f"a bug stopped the sending task: {error!r}")
            task.get_loop().call_exception_handler({"message": "the journal's lane stopped", "exception": error})

    def _fail_all(self, cause: str) -> None:
        """What waits and what comes fails from here on."""
        self._closed = cause
        for write in (*self._under_way.values(), *self._queue):
            write.settle(self._unavailable(write.started, cause))
        self.waiting_bytes -= sum(write.size_bytes for write in self._queue)
        self._queue.clear()
        self._room.set()

    def _unavailable(self, started: float, cause: str) -> JournalUnavailableError:
        return JournalUnavailableError(self._sender.address, time.monotonic() - started, cause)
