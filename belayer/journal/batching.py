"""The lane: one connection on which all writes of one shard travel, as many as are waiting in each round trip.

Invariants:
- group commit: while one group is under way new writes wait, and go together into the next one;
- a group holds at most one write of a stream, so a stream's writes stay in order;
- what waits is bounded in bytes: callers then wait for room, nothing is dropped;
- an XADD is sent only for a stream whose last event is known *over this very link* to be what the writer expects.
  A new link (after a crash or failover of the server, or for the first append) therefore reads every stream's last
  entry before its next append: events that the server lost are found there, never papered over by a gap.

When the link breaks every write under way is looked up by its bytes before it is sent again, so it is stored once.
A write that has not come through by its deadline fails with JournalUnavailableError, and whether it took effect is
unknown. A caller that is cancelled: a write that still waits is not sent; one that is under way may be stored.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import hiredis
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential

from belayer.errors import JournalError, JournalUnavailableError, ServerRefusedError
from belayer.ids import StreamId
from belayer.journal.address import Address
from belayer.journal.codec import GENESIS, Entry, previous_digest_of
from belayer.journal.durability import Durability
from belayer.journal.keys import Keys, entry_id, stored_entry
from belayer.journal.link import Link, LinkLostError, Reply, pack
from belayer.journal.outcome import check_chain
from belayer.journal.replies import ELSEWHERE, Again, Refused, judged_error, refused_command
from belayer.journal.server import REPLY_S
from belayer.journal.server_checks import check_server
from belayer.journal.writes import Append, TakeOver

GROUP_BYTES = 1 << 20
GROUP_WRITES = 512
WAITING_BYTES = 64 << 20
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
_LEAST_ATTEMPT_S = 0.1
_MOST_TAILS = 200_000


class _Tail(NamedTuple):
    """A stream's last event as known over the present link. `digest` empty: not known."""

    sequence: int
    digest: bytes


_EMPTY = _Tail(0, GENESIS)


class Lane:
    """The writes of one shard. `start` it in the event loop that uses it; `close` it at the end."""

    def __init__(
        self,
        address: Address,
        keys: Keys,
        shard: int,
        durability: Durability,
        replicas: int,
        timeout_s: float,
        waiting_bytes: int = WAITING_BYTES,
    ) -> None:
        self._address = address
        self._keys = keys
        self._shard = shard
        self._durability = durability
        self._replicas = replicas
        self._timeout_s = timeout_s
        self._link: Link | None = None
        self._tails: dict[StreamId, _Tail] = {}
        self._queue: deque[Append] = deque()
        self.waiting_bytes = 0
        self._most_waiting_bytes = waiting_bytes
        self._room = asyncio.Condition()
        self._arrived = asyncio.Event()
        self._group: list[Append] = []
        self._sender: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect once, so that a wrong address or an unfit server shows here, and begin to send."""
        started = time.monotonic()
        try:
            await self._linked(self._timeout_s)
        except LinkLostError as error:
            raise self._unavailable(started, error.cause) from None
        self._sender = asyncio.create_task(self._run(), name=f"belayer-lane-{self._shard}")

    async def close(self) -> None:
        """Stop sending. Writes that wait or are under way fail."""
        self._fail_all("the store was closed")
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait([self._sender])
        if self._link is not None:
            self._link.close()

    async def append(self, stream: StreamId, entry: Entry, notice_tag: str | None) -> None:
        """Store the entry; returns once it is as durable as the mode says."""
        now = time.monotonic()
        done: asyncio.Future[Entry | None] = asyncio.get_running_loop().create_future()
        write = Append(stream, entry, notice_tag, self._keys.stream(stream), now, now + self._timeout_s, done)
        await self._submit(write)

    async def take_over(self, stream: StreamId, after: Entry | None, entry: Entry) -> Entry | None:
        """Store the entry if `after` is the last one; None when done, else the entry that is last."""
        now = time.monotonic()
        done: asyncio.Future[Entry | None] = asyncio.get_running_loop().create_future()
        write = TakeOver(stream, entry, after, self._keys.stream(stream), now, now + self._timeout_s, done)
        return await self._submit(write)

    async def _submit(self, write: Append) -> Entry | None:
        if not self._has_room(write):
            await self._wait_for_room(write)
        if self._sender is None or self._sender.done():
            raise self._unavailable(write.started, "the store is closed")
        self.waiting_bytes += write.size_bytes
        self._queue.append(write)
        self._arrived.set()
        return await write.done

    def _has_room(self, write: Append) -> bool:
        """A write that is larger than all the room there is goes alone."""
        return not self.waiting_bytes or self.waiting_bytes + write.size_bytes <= self._most_waiting_bytes

    async def _wait_for_room(self, write: Append) -> None:
        try:
            async with asyncio.timeout(self._timeout_s), self._room:
                await self._room.wait_for(lambda: self._has_room(write))
        except TimeoutError:
            raise self._unavailable(write.started, f"{self.waiting_bytes} bytes are waiting already") from None

    # --- sending ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                await self._arrived.wait()
                self._group = self._next_group()
                if self._group:
                    size_bytes = sum(write.size_bytes for write in self._group)
                    await self._settle_group()
                    self.waiting_bytes -= size_bytes
                    async with self._room:
                        self._room.notify_all()
        except BaseException as error:
            self._fail_all(f"the sender ended: {error!r}")
            raise

    def _next_group(self) -> list[Append]:
        """Take what waits, in order, up to the limits; at most one write of a stream."""
        group: list[Append] = []
        streams: set[StreamId] = set()
        later: list[Append] = []
        size_bytes = 0
        while self._queue and size_bytes < GROUP_BYTES and len(group) < GROUP_WRITES:
            write = self._queue.popleft()
            if write.done.done():
                self.waiting_bytes -= write.size_bytes
            elif write.stream in streams:
                later.append(write)
            else:
                streams.add(write.stream)
                group.append(write)
                size_bytes += write.size_bytes
        self._queue.extendleft(reversed(later))
        if not self._queue:
            self._arrived.clear()
        return group

    async def _settle_group(self) -> None:
        """Try until every write of the group is stored, refused or past its deadline."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(Again),
            wait=wait_random_exponential(multiplier=_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S),
        )
        async for attempt in retrying:
            with attempt:
                cause = await self._try_group()
                self._expire(cause)
                self._group = [write for write in self._group if not write.done.done()]
                if self._group:
                    raise Again(cause)

    async def _try_group(self) -> str:
        """Send what is not settled; why some of it may still not be."""
        earliest = min(write.deadline for write in self._group)
        timeout_s = min(REPLY_S, max(_LEAST_ATTEMPT_S, earliest - time.monotonic()))
        try:
            await self._send(await self._linked(timeout_s), timeout_s)
        except (LinkLostError, Again) as error:
            return error.cause
        except JournalError as error:
            for write in self._group:
                self._finish(write, error)
        return ""

    async def _send(self, link: Link, timeout_s: float) -> None:
        """One attempt at the group. Again when some writes must wait; LinkLostError when their outcome is unknown."""
        again: str | None = None
        found = await self._look(link, [write for write in self._group if self._is_unknown(write)], timeout_s)
        sent = [write for write in self._group if not write.done.done() and write not in found]
        packed: list[bytes] = []
        counts: list[int] = []
        for write in sent:
            commands, count = write.pack(self._keys, self._shard, self._tails.get(write.stream) == _EMPTY)
            packed.append(commands)
            counts.append(count)
        confirm, confirm_count = self._confirm(timeout_s, bool(found))
        replies = await link.exchange([*packed, *confirm], sum(counts) + confirm_count, timeout_s)
        stored: list[Append] = []
        refused: list[Append] = []
        at = 0
        for write, count in zip(sent, counts, strict=True):
            try:
                if self._is_stored(write, replies[at : at + count]):
                    stored.append(write)
            except Again as error:
                again = error.cause
            except Refused:
                refused.append(write)
            at += count
        if confirm_count:
            self._check_confirmed(replies[-1])
        for write in stored:
            self._tails[write.stream] = _Tail(write.entry.last_sequence, write.entry.digest)
        if refused and (late := await self._look(link, refused, timeout_s)):
            confirm, confirm_count = self._confirm(timeout_s, True)
            if confirm_count:
                self._check_confirmed((await link.exchange(confirm, confirm_count, timeout_s))[-1])
            found += late
        for write in (*found, *stored):
            self._finish(write, None)
        if again is not None:
            if again.startswith(ELSEWHERE):
                self._lose_link()
            raise Again(again)

    def _is_stored(self, write: Append, replies: Sequence[Reply]) -> bool:
        """True when the write is stored; False when it is settled otherwise. Again, Refused."""
        try:
            last = write.judge(self._address.shown, replies)
        except JournalError as error:
            self._finish(write, error)
            return False
        if last is not None:
            self._finish(write, last)
        return last is None

    def _is_unknown(self, write: Append) -> bool:
        """Whether an append may not be sent before a look at its stream."""
        if isinstance(write, TakeOver):
            return False
        tail = self._tails.get(write.stream)
        if tail is None or tail.sequence != write.entry.expected_sequence:
            return True
        return tail.digest != b"" and tail.digest != previous_digest_of(write.entry.body)

    async def _look(self, link: Link, writes: list[Append], timeout_s: float) -> list[Append]:
        """Read where the streams are. Returns the writes that are stored already, settles those that can never be.

        For the others the last sequence is known from here on.
        """
        if not writes:
            return []
        packed: list[bytes] = []
        for write in writes:
            identifier = entry_id(write.entry)
            packed.append(pack((b"XREVRANGE", write.key, b"+", b"-", b"COUNT", b"1")))
            packed.append(pack((b"XRANGE", write.key, identifier, identifier)))
        replies = await link.exchange(packed, len(packed), timeout_s)
        found: list[Append] = []
        for write, newest, same_id in zip(writes, replies[::2], replies[1::2], strict=True):
            for reply in (newest, same_id):
                if isinstance(reply, hiredis.ReplyError):
                    error = judged_error(self._address.shown, reply)
                    raise error if not isinstance(error, Refused) else Again(str(reply))
            last, stored = (
                stored_entry(write.stream, *entries[0]) if entries else None for entries in (newest, same_id)
            )
            self._tails[write.stream] = _EMPTY if last is None else _Tail(last.last_sequence, b"")
            if stored is not None and stored.body == write.entry.body:
                found.append(write)
            elif error := check_chain(write.stream, write.entry, last):
                self._finish(write, error)
        return found

    # --- durability -------------------------------------------------------------------------------------------------

    def _confirm(self, timeout_s: float, mark: bool) -> tuple[list[bytes], int]:
        """Commands that answer once this link's writes are as durable as promised, and how many replies they have.

        They cover what *this link* wrote, so for a write found from another link a mark is written first.
        """
        wait_ms = str(max(1, int(timeout_s * 900)))
        match self._durability:
            case Durability.MEMORY | Durability.EVERYSEC:
                return [], 0
            case Durability.FSYNC:
                command = pack((b"WAITAOF", b"1", b"0", wait_ms))
            case Durability.REPLICATED:
                command = pack((b"WAIT", str(self._replicas), wait_ms))
        if mark:
            return [pack((b"SET", self._keys.mark(self._shard), b"1")), command], 2
        return [command], 1

    def _check_confirmed(self, reply: Reply) -> None:
        """Again when the reply says that the writes are stored but not yet as durable as promised."""
        match self._durability:
            case Durability.MEMORY | Durability.EVERYSEC:
                return
            case Durability.FSYNC:
                confirmed = int(reply[0]) if isinstance(reply, list) else 0  # pyright: ignore[reportUnknownArgumentType]
                wanted, what = 1, "disks"
            case Durability.REPLICATED:
                confirmed, wanted, what = reply if isinstance(reply, int) else 0, self._replicas, "replicas"
        if isinstance(reply, hiredis.ReplyError):
            raise refused_command(self._address.shown, reply)
        if confirmed < wanted:
            raise Again(f"{confirmed} of {wanted} {what} have it")

    # --- link and ends ----------------------------------------------------------------------------------------------

    async def _linked(self, timeout_s: float) -> Link:
        """The link, opened anew and checked when it was lost; what was known about streams is then forgotten.

        A server that is found unfit after a reconnect (a demoted primary, say) is waited for like one that is away.
        """
        if self._link is not None and not self._link.is_lost:
            if len(self._tails) > _MOST_TAILS:
                self._tails.clear()
            return self._link
        self._lose_link()
        link = await Link.open(self._address, f"belayer-lane-{self._shard}", timeout_s)
        try:
            await check_server(link, self._address.shown, self._durability, self._replicas, timeout_s)
        except ServerRefusedError as error:
            link.close()
            if self._sender is None:
                raise
            raise LinkLostError(str(error)) from None
        except BaseException:
            link.close()
            raise
        self._link = link
        return link

    def _lose_link(self) -> None:
        self._tails.clear()
        if self._link is not None:
            self._link.close()
            self._link = None

    def _expire(self, cause: str) -> None:
        now = time.monotonic()
        for write in (*self._group, *self._queue):
            if write.deadline <= now and not write.done.done():
                self._finish(write, self._unavailable(write.started, cause))

    def _finish(self, write: Append, outcome: Entry | JournalError | None) -> None:
        if write.done.done():
            return
        if isinstance(outcome, JournalError):
            write.done.set_exception(outcome)
        else:
            write.done.set_result(outcome)

    def _fail_all(self, cause: str) -> None:
        for write in (*self._group, *self._queue):
            if not write.done.done():
                self._finish(write, self._unavailable(write.started, cause))
        self._group = []
        self._queue.clear()

    def _unavailable(self, started: float, cause: str) -> JournalUnavailableError:
        return JournalUnavailableError(self._address.shown, time.monotonic() - started, cause)
