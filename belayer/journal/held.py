"""What was acknowledged lately, held so that it can be stored again when the server turns out to have lost it.

A failover to a replica that lagged, or a crash in mode everysec, loses the newest events although they were
acknowledged. As long as the process that wrote them lives and they are still held, nothing is lost: see
`belayer.journal.restoring`. Bounded in bytes and in time; the oldest are let go first, but nothing while there is no
server to acknowledge anything newer.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from belayer.journal.codec import Entry
from belayer.journal.writes import Append

HELD_BYTES = 32 << 20
"""For all shards of a store together: five seconds of 2,500 chunks/s of 256 tokens."""
HELD_S = 10.0


class Held:
    """The newest acknowledged writes of one shard."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._size_bytes = 0
        self._groups: deque[tuple[float, int, tuple[Append, ...]]] = deque()
        self._settled: asyncio.Future[Entry | None] | None = None
        self.kept_until = 0.0
        """Until then nothing is let go for its age: something before it may still be stored again."""

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, writes: Sequence[Append]) -> None:
        """Hold writes that were acknowledged just now, and let go of what is too old or too much.

        All share one settled future from here on, and a group is a tuple: the garbage collector need not walk through
        any of them. 100,000 held writes of 32 tokens made it stop the process for 30 ms.
        """
        if not writes or not self._most_bytes:
            return
        size_bytes = 0
        if (settled := self._settled) is None:
            settled = self._settled = writes[0].done
        for write in writes:
            size_bytes += write.size_bytes
            write.done = settled
        self._groups.append((time.monotonic(), size_bytes, tuple(writes)))
        self._size_bytes += size_bytes
        self.prune()

    def prune(self) -> None:
        """Let go of what is too old or too much. Only while the server is known to be there."""
        now = time.monotonic()
        oldest = now - HELD_S if now > self.kept_until else 0.0
        while self._groups and (self._size_bytes > self._most_bytes or self._groups[0][0] < oldest):
            _, size_bytes, _ = self._groups.popleft()
            self._size_bytes -= size_bytes

    def forget(self, keys: set[bytes]) -> None:
        """These streams are no longer ours to store again: they were removed, or somebody else went on with them."""
        self._groups = deque(
            (at, sum(write.size_bytes for write in kept), kept)
            for at, _, writes in self._groups
            if (kept := tuple(write for write in writes if write.key not in keys))
        )
        self._size_bytes = sum(size_bytes for _, size_bytes, _ in self._groups)

    def by_stream(self) -> list[list[Append]]:
        """The held writes of each stream, oldest first."""
        streams: dict[bytes, list[Append]] = {}
        for _, _, writes in self._groups:
            for write in writes:
                streams.setdefault(write.key, []).append(write)
        return list(streams.values())
