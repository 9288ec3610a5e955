"""The journal in Redis Streams.

An entry is one stream entry with the id `<epoch>-<sequence>`; Redis refuses an id that is not above the stream's last
one, which is the optimistic lock and the fence at once (see docs/journal.md). Writes go through one lane a shard
(`belayer.journal.batching`), everything else through a pool of links (`belayer.journal.server`): one pool for all
shards of a single server, one a shard in a cluster, where each shard is a slot of its own.

Every call has a deadline of `timeout_s`; until then a server that is away, loading or full is asked again. After it,
JournalUnavailableError.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from belayer.errors import InputError
from belayer.ids import StreamId, StreamKind
from belayer.journal.batching import WAITING_BYTES, Lane
from belayer.journal.codec import Entry
from belayer.journal.durability import Durability
from belayer.journal.groups import Group, look_at_groups
from belayer.journal.held import HELD_BYTES
from belayer.journal.keys import Keys, entry_id, stored_entry
from belayer.journal.packing import TokenForm
from belayer.journal.restoring import read_loss, removal_mark
from belayer.journal.route import Routes
from belayer.journal.sealing import Keyring
from belayer.journal.sending import Sender
from belayer.journal.server import Server
from belayer.journal.store import Loss, Subscription
from belayer.journal.subscription import subscribe
from belayer.journal.waiting import Waiting
from belayer.journal.writes import TRIM

_MOST_POSITIONS = 200_000
_SCAN = 1000
_REMOVED_S = "60"
"""How long a removed stream's mark stays; longer than any writer holds what it had acknowledged."""


class RedisStore:
    """A JournalStore in Redis. Made by `belayer.journal.connect.open_store`."""

    def __init__(
        self,
        routes: Routes,
        keys: Keys,
        durability: Durability = Durability.EVERYSEC,
        *,
        replicas: int = 1,
        timeout_s: float = 30.0,
        waiting_bytes: int = WAITING_BYTES,
        held_bytes: int = HELD_BYTES,
        keyring: Keyring | None = None,
        token_form: TokenForm = "plain",
    ) -> None:
        self.keyring = keyring
        self.token_form: TokenForm = token_form
        self._routes = routes
        self._keys = keys
        self._durability = durability
        ways = [routes.of(keys.mark(shard)) for shard in range(keys.shards)]
        options: dict[str, Any] = {"is_cluster": routes.is_cluster, "held_bytes": held_bytes // keys.shards}
        room_bytes = waiting_bytes // keys.shards
        self._lanes = [
            Lane(Sender(way, keys, shard, durability, replicas, **options), keys, timeout_s, room_bytes)
            for shard, way in enumerate(ways)
        ]
        if routes.is_cluster:
            self._servers = [Server(way, timeout_s, shared_links=1) for way in ways]
        else:
            self._servers = [Server(ways[0], timeout_s)] * keys.shards
        self._waits = [Waiting(server) for server in self._servers]
        self._epochs: dict[tuple[StreamId, int], int] = {}

    async def start(self) -> None:
        """Connect. ServerRefusedError or JournalUnavailableError when this server will not do."""
        for lane in self._lanes:
            await lane.start()
        await self._fix_layout()

    async def close(self) -> None:
        for lane in self._lanes:
            await lane.close()
        for waits in self._waits:
            await waits.close()
        for server in self._servers:
            server.close()

    @property
    def durability(self) -> str:
        return self._durability

    @property
    def address(self) -> str:
        """The journal's URL, without a password."""
        return self._routes.shown

    @property
    def waiting_bytes(self) -> int:
        """How much is waiting to be stored, on all lanes."""
        return sum(lane.waiting_bytes for lane in self._lanes)

    def append(self, stream: StreamId, entry: Entry, notice_tag: str | None = None) -> Awaitable[None]:
        return self._lanes[self._keys.shard_of(stream)].append(stream, entry, notice_tag)

    def take_over(self, stream: StreamId, after: Entry | None, entry: Entry) -> Coroutine[Any, Any, Entry | None]:
        return self._lanes[self._keys.shard_of(stream)].take_over(stream, after, entry)

    async def last(self, stream: StreamId) -> Entry | None:
        found = await self._server_of(stream).ask("XREVRANGE", self._keys.stream(stream), "+", "-", "COUNT", "1")
        return stored_entry(stream, *found[0]) if found else None

    async def read(self, stream: StreamId, after_sequence: int = 0, limit: int = 1000) -> list[Entry]:
        epoch = await self._epoch_at(stream, after_sequence)
        entries = await self._range(stream, f"({epoch}-{after_sequence}", limit)
        if entries:
            if len(self._epochs) > _MOST_POSITIONS:
                self._epochs.clear()
            self._epochs[stream, entries[-1].last_sequence] = entries[-1].epoch
        return entries

    async def wait(self, stream: StreamId, after_sequence: int, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            last = await self.last(stream)
            if last is not None and last.last_sequence > after_sequence:
                if last.epoch < self._epochs.get((stream, after_sequence), 0):  # a server lost that epoch
                    del self._epochs[stream, after_sequence]
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            after = (0, 0) if last is None else (last.epoch, last.last_sequence)
            await self._waits[self._keys.shard_of(stream)].wait(self._keys.stream(stream), after, left_s)

    async def streams(self, kind: StreamKind | None = None) -> Sequence[StreamId]:
        found: set[StreamId] = set()
        for shard in range(self._keys.shards):
            cursor = b"0"
            while True:
                command = ("SSCAN", self._keys.names(shard), cursor, "COUNT", str(_SCAN))
                cursor, names = await self._servers[shard].ask(*command)
                found.update(StreamId.parse(name.decode()) for name in names)
                if cursor == b"0":
                    break
        return sorted(stream for stream in found if kind in (None, stream.kind))

    async def trim(self, stream: StreamId, first: Entry) -> None:
        key = self._keys.stream(stream)
        await self._server_of(stream).ask("EVAL", TRIM, "2", key, key + b":trim", entry_id(first), first.body)

    async def remove(self, stream: StreamId) -> None:
        names = self._keys.names(self._keys.shard_of(stream))
        self._lanes[self._keys.shard_of(stream)].forget(stream)
        first = await self._range(stream, "-", 1)
        mark = [("SET", self._keys.removed(stream), removal_mark(first[0]), "EX", _REMOVED_S)] if first else []
        unlink = [("UNLINK", self._keys.stream(stream)), ("SREM", names, str(stream))]
        await self._server_of(stream).ask_all([("MULTI",), *unlink, *mark, ("EXEC",)])

    async def losses(self) -> list[Loss]:
        found: list[Loss] = []
        for shard in range(self._keys.shards):
            entries = await self._servers[shard].ask("XRANGE", self._keys.losses(shard), "-", "+")
            found += [read_loss(fields) for _, fields in entries]
        return sorted(found, key=lambda loss: loss.time_ns)

    async def groups(self) -> list[Group]:
        """The consumer groups on the control streams, and how far each is behind."""
        return await look_at_groups(self._servers, self._keys)

    def subscribe(
        self, group: str, consumer: str, stale_after_s: float = 5.0
    ) -> AbstractAsyncContextManager[Subscription]:
        return subscribe(self._servers, self._keys, group, consumer, stale_after_s)

    # --- reading ----------------------------------------------------------------------------------------------------

    def _server_of(self, stream: StreamId) -> Server:
        return self._servers[self._keys.shard_of(stream)]

    async def _range(self, stream: StreamId, start: str, limit: int) -> list[Entry]:
        command = ("XRANGE", self._keys.stream(stream), start, "+", "COUNT", str(limit))
        found = await self._server_of(stream).ask(*command)
        return [stored_entry(stream, identifier, fields) for identifier, fields in found]

    async def _epoch_at(self, stream: StreamId, sequence: int) -> int:
        """The epoch of the newest entry that ends at or before the sequence; 0 for none.

        Known from the last read, or found by bisection over epochs: they rise with the sequence.
        """
        if sequence == 0:
            return 0
        if (known := self._epochs.get((stream, sequence))) is not None:
            return known
        last = await self.last(stream)
        if last is None or last.last_sequence <= sequence:
            return 0 if last is None else last.epoch
        low, high = 0, last.epoch
        while low < high:
            middle = (low + high + 1) // 2
            first = await self._range(stream, f"{middle}-0", 1)
            if first and first[0].last_sequence <= sequence:
                low = middle
            else:
                high = middle - 1
        return low

    async def _fix_layout(self) -> None:
        """The first to use a namespace fixes its number of shards; whoever has another one must not write."""
        key, shards = self._keys.layout, self._keys.shards
        _, stored = await self._servers[0].ask_all([("SET", key, str(shards), "NX"), ("GET", key)])
        found = int(stored or shards)
        if found != shards:
            raise InputError(
                f"namespace {self._keys.namespace!r} at {self.address} has {found} shards, not {shards}; "
                f"open it with shards={found}"
            )
