"""The names of everything in Redis, and the form of entry ids.

All keys of a shard share a hash tag, so they are in one slot of a cluster and one MULTI may touch them. A stream's
shard follows from its name and the number of shards, which a namespace fixes when it is first used.
"""

from __future__ import annotations

import zlib

from belayer.errors import CodecError
from belayer.ids import StreamId, checked_name
from belayer.journal.codec import Entry, count_of

BODY_FIELD = b"e"
NOTICE_STREAM_FIELD = b"s"
NOTICE_TAG_FIELD = b"t"
_MOST_KEPT = 200_000


class Keys:
    """Key names of one namespace."""

    def __init__(self, namespace: str, shards: int) -> None:
        self.namespace = checked_name(namespace)
        self.shards = shards
        self._prefixes = [f"{{belayer:{namespace}:{shard}}}:" for shard in range(shards)]
        self._streams: dict[StreamId, bytes] = {}

    def shard_of(self, stream: StreamId) -> int:
        """Which shard has the stream and its notices."""
        return zlib.crc32(str(stream).encode()) % self.shards if self.shards > 1 else 0

    def stream(self, stream: StreamId) -> bytes:
        """The Redis Stream that holds the stream's entries."""
        if (key := self._streams.get(stream)) is None:
            if len(self._streams) >= _MOST_KEPT:
                self._streams.clear()
            key = self._streams[stream] = f"{self._prefixes[self.shard_of(stream)]}s:{stream}".encode()
        return key

    def control(self, shard: int) -> bytes:
        """The shard's control stream."""
        return f"{self._prefixes[shard]}control".encode()

    def names(self, shard: int) -> bytes:
        """The set of the names of the shard's streams."""
        return f"{self._prefixes[shard]}names".encode()

    def mark(self, shard: int) -> bytes:
        """A key that is written when only a write's durability is wanted."""
        return f"{self._prefixes[shard]}mark".encode()

    def losses(self, shard: int) -> bytes:
        """The stream of what the server was found to have lost."""
        return f"{self._prefixes[shard]}losses".encode()

    def removed(self, stream: StreamId) -> bytes:
        """A key that exists for a minute after the stream was removed."""
        return f"{self._prefixes[self.shard_of(stream)]}removed:{stream}".encode()

    @property
    def layout(self) -> bytes:
        """The key that keeps the namespace's number of shards."""
        return layout_key(self.namespace)


def layout_key(namespace: str) -> bytes:
    """The key that keeps a namespace's number of shards, in the hash tag of shard 0."""
    return f"{{belayer:{namespace}:0}}:shards".encode()


def entry_id(entry: Entry) -> bytes:
    """`<epoch>-<sequence of the last event>`."""
    return b"%d-%d" % (entry.epoch, entry.last_sequence)


def stored_entry(stream: StreamId, identifier: bytes, fields: list[bytes]) -> Entry:
    """An entry as Redis gives it back."""
    epoch, _, sequence = identifier.partition(b"-")
    where = f"{stream} entry {identifier.decode()}"
    if len(fields) != 2 or fields[0] != BODY_FIELD:
        raise CodecError(where, f"has the fields {fields[::2]!r}, not one of Belayer's")
    return Entry(int(epoch), int(sequence), count_of(where, fields[1]), fields[1])
