"""Notices from the control streams, each to one consumer of a group.

A stale notice (its consumer has not renewed it) goes before a new one. Delivery is at least once: a group that the
server lost is created again from the beginning of the control stream, and notices then come again, which is harmless.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress

import hiredis

from belayer.errors import CodecError, InputError, JournalUnavailableError
from belayer.ids import StreamId
from belayer.journal.keys import NOTICE_STREAM_FIELD, NOTICE_TAG_FIELD, Keys
from belayer.journal.link import Packable, Reply
from belayer.journal.server import Server
from belayer.journal.store import Notice

RENEW_TOGETHER_S = 0.02
_BLOCK_S = 2.0
_CLAIM_AT_ONCE = 16
_CLAIM_CALLS = 64
_INHERIT_AT_ONCE = 256
_GROUP_LOST = "NOGROUP"
_GROUP_EXISTS = "BUSYGROUP"


@asynccontextmanager
async def subscribe(
    servers: Sequence[Server], keys: Keys, group: str, consumer: str, stale_after_s: float
) -> AsyncGenerator[RedisSubscription]:
    """Join the group on every shard (`servers`: one for each), creating it when needed.

    At the end leave it where nothing is pending for us.
    """
    subscription = RedisSubscription(servers, keys, group, consumer, stale_after_s)
    await subscription.create_groups()
    try:
        yield subscription
    finally:
        with suppress(JournalUnavailableError):
            await subscription.leave()


class RedisSubscription:
    """One consumer. Use `next` from one task at a time; `done` and `renew` from any."""

    def __init__(self, servers: Sequence[Server], keys: Keys, group: str, consumer: str, stale_after_s: float) -> None:
        self._servers = servers
        shards = range(keys.shards)
        self._together = [shards] if len(set(servers)) == 1 else [range(shard, shard + 1) for shard in shards]
        """The shards that are read with one command: all of them, or in a cluster each alone."""
        self._controls = [keys.control(shard) for shard in range(keys.shards)]
        self._group = group
        self._consumer = consumer
        self._stale_after_s = stale_after_s
        self._claim_at = 0.0
        self._cursors = [b"0-0"] * keys.shards
        self._ready: deque[tuple[Notice, float]] = deque()
        """Came along with another one, and when. One that waits here for too long is stale and another consumer's."""
        self._came = asyncio.Event()
        """Something came that was not read: whoever waits for new notices need not wait any longer."""
        self._renewing: dict[int, set[str]] = {}
        self._renewal: asyncio.Task[None] | None = None
        """The one that collects; those that are on their way end by themselves."""

    async def next(self, timeout_s: float) -> Notice | None:
        deadline = time.monotonic() + timeout_s
        while True:
            if (notice := self._take_ready()) is not None:
                return notice
            if time.monotonic() >= self._claim_at:
                await self._claim_stale()
            else:
                until = min(deadline, self._claim_at, time.monotonic() + _BLOCK_S)
                await self._read_new(until - time.monotonic())
                if not self._ready and time.monotonic() >= deadline:
                    return None

    async def done(self, notice: Notice) -> None:
        shard, identifier = self._delivery(notice)
        await self._servers[shard].ask("XACK", self._controls[shard], self._group, identifier)

    async def renew(self, notice: Notice) -> None:
        """Idle time back to 0, and the notice is ours; nothing when it is done.

        Renewals of RENEW_TOGETHER_S go together, because a detector renews thousands of watches.
        """
        shard, identifier = self._delivery(notice)
        self._renewing.setdefault(shard, set()).add(identifier)
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew_together())
        await asyncio.shield(self._renewal)

    async def _renew_together(self) -> None:
        await asyncio.sleep(RENEW_TOGETHER_S)
        renewing, self._renewing, self._renewal = self._renewing, {}, None
        for shard, identifiers in renewing.items():
            key = self._controls[shard]
            await self._ask_group(shard, "XCLAIM", key, self._group, self._consumer, "0", *identifiers, "JUSTID")

    async def holders(self) -> Sequence[str]:
        found: set[str] = set()
        for shard, key in enumerate(self._controls):
            _, _, _, holders = await self._ask_group(shard, "XPENDING", key, self._group)
            found.update(name.decode() for name, _ in holders or ())
        return sorted(found)

    async def inherit(self, consumer: str) -> None:
        """A notice that is younger than it was when we looked has gone to another heir and is left to him."""
        for shard, key in enumerate(self._controls):
            first = "-"
            while pending := await self._ask_group(
                shard, "XPENDING", key, self._group, first, "+", str(_INHERIT_AT_ONCE), consumer
            ):
                claims = [
                    ("XCLAIM", key, self._group, self._consumer, str(idle_ms), identifier)
                    for identifier, _, idle_ms, _ in pending
                ]
                for claimed in await self._servers[shard].ask_all(claims, accept=(_GROUP_LOST,)):
                    if not isinstance(claimed, hiredis.ReplyError):
                        self._add_ready(shard, [entry for entry in claimed if entry is not None])
                first = f"({pending[-1][0].decode()}"
        self._came.set()

    async def create_groups(self) -> None:
        """On every shard, from the beginning of its control stream; where it exists nothing happens."""
        for server, key in zip(self._servers, self._controls, strict=True):
            await server.ask("XGROUP", "CREATE", key, self._group, "0", "MKSTREAM", accept=(_GROUP_EXISTS,))

    async def leave(self) -> None:
        """Take our name out of the group where nothing is pending for it; what is pending stays, to go stale."""
        if self._renewal is not None:
            self._renewal.cancel()
        for shard, key in enumerate(self._controls):
            pending = await self._ask_group(shard, "XPENDING", key, self._group, "-", "+", "1", self._consumer)
            if not pending:
                await self._ask_group(shard, "XGROUP", "DELCONSUMER", key, self._group, self._consumer)

    def _take_ready(self) -> Notice | None:
        while self._ready:
            notice, since = self._ready.popleft()
            if time.monotonic() - since < self._stale_after_s:
                return notice
        return None

    async def _claim_stale(self) -> None:
        """Look for stale notices, from where the last look ended; the next look is due in a quarter of the time.

        XAUTOCLAIM looks at ten pending notices for each that it may claim, so it is called until it has been through
        them all, has found some, or has had its share of this look.
        """
        self._claim_at = time.monotonic() + self._stale_after_s / 4  # also when one of them cannot be read
        stale_ms = str(math.ceil(self._stale_after_s * 1000))
        for shard, key in enumerate(self._controls):
            for _ in range(_CLAIM_CALLS):
                command = ("XAUTOCLAIM", key, self._group, self._consumer, stale_ms, self._cursors[shard])
                reply = await self._ask_group(shard, *command, "COUNT", str(_CLAIM_AT_ONCE))
                self._cursors[shard] = reply[0]
                self._add_ready(shard, reply[1])
                if reply[0] == b"0-0" or self._ready:
                    break
        self._claim_at = 0.0 if self._ready else time.monotonic() + self._stale_after_s / 4

    async def _read_new(self, timeout_s: float) -> None:
        """The next new notice of any shard, or none when none comes in time.

        In a cluster each shard is first asked without waiting, another one first each time, so that a consumer does
        not take one notice of every shard when it wants one. The shard that has one first then ends the waiting.
        """
        if len(self._together) > 1:
            self._together.append(self._together.pop(0))
            for shards in self._together:
                await self._read_shards(shards)
                if self._ready:
                    return
        self._came.clear()
        reads = [
            asyncio.create_task(self._read_shards(shards, max(0.001, timeout_s), self._came))
            for shards in self._together
        ]
        try:
            await asyncio.gather(*reads)
        finally:
            for read in reads:
                read.cancel()
            await asyncio.wait(reads)

    async def _read_shards(self, shards: range, block_s: float = 0.0, ended: asyncio.Event | None = None) -> None:
        controls = [self._controls[shard] for shard in shards]
        block = ("BLOCK", str(math.ceil(block_s * 1000))) if block_s else ()
        reply = await self._ask_group(
            shards[0],
            *("XREADGROUP", "GROUP", self._group, self._consumer, "COUNT", "1", *block),
            *("STREAMS", *controls, *[">"] * len(controls)),
            block_s=block_s,
            ended=ended,
        )
        for key, entries in reply or ():
            self._add_ready(self._controls.index(key), entries)
            if ended is not None:
                ended.set()

    def _add_ready(self, shard: int, entries: Reply) -> None:
        """CodecError for one that cannot be read, when all others are added."""
        now, unreadable = time.monotonic(), None
        for entry in entries:
            try:
                self._ready.append((self._notice(shard, entry), now))
            except CodecError as error:
                unreadable = error
        if unreadable is not None:
            raise unreadable

    async def _ask_group(
        self, shard: int, *command: Packable, block_s: float = 0.0, ended: asyncio.Event | None = None
    ) -> Reply:
        """The reply; a group that the server has lost is created again from the start."""
        while True:
            reply = await self._servers[shard].ask(*command, block_s=block_s, ended=ended, accept=(_GROUP_LOST,))
            if not isinstance(reply, hiredis.ReplyError):
                return reply
            await self.create_groups()

    def _notice(self, shard: int, entry: Reply) -> Notice:
        identifier: bytes = entry[0]
        fields: list[bytes] = entry[1]
        try:
            named = dict(zip(fields[::2], fields[1::2], strict=True))
            stream = StreamId.parse(named[NOTICE_STREAM_FIELD].decode())
            tag = named[NOTICE_TAG_FIELD].decode()
        except (KeyError, ValueError, InputError) as error:
            where = f"{self._controls[shard].decode()} {identifier.decode()}"
            raise CodecError(where, f"not a notice: {error!r}") from None
        return Notice(stream, tag, f"{shard}/{identifier.decode()}")

    @staticmethod
    def _delivery(notice: Notice) -> tuple[int, str]:
        shard, _, identifier = notice.delivery.partition("/")
        return int(shard), identifier
