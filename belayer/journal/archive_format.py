"""One segment of the archive: streams of finished trajectories, compressed, with their index, in one file.

The file: zstd frames, one for each part of a stream; the index, a zstd frame too; the trailer. So `zstd -d` reads it,
one part can be read without the rest, and there is no moment at which a segment exists without its index. A part's
content is the msgpack array of its entries [epoch, last sequence, body], the bodies as the server had them. The index
names every part with its place, its digest (blake2b-128 of the frame) and the digests that tie its events to those
before and after. The trailer: length of the index, its digest, MAGIC.

Whatever does not fit what the index says is an ArchiveError naming segment and stream; nothing is passed over. Writing
needs the memory of one segment, reading that of one part (PART_BYTES, or one larger entry).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import zstandard

from belayer import __version__
from belayer.errors import ArchiveError, CodecError
from belayer.ids import StreamId
from belayer.journal.codec import Entry, count_of, decode_entry, digest_of

MAGIC = b"BELAYARC"
PART_BYTES = 8 << 20
"""A part ends once it holds so much, uncompressed."""
LEVEL = 3
"""zstd's own default: higher levels take several times as long for 1 to 2% of token columns."""
_TRAILER = struct.Struct("<I16s8s")
TRAILER_BYTES = _TRAILER.size
_MOST_PART_BYTES = 1 << 31

Record = tuple[int, int, bytes]
_encoder = msgspec.msgpack.Encoder()
_records = msgspec.msgpack.Decoder(list[Record])


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A run of a stream's entries within a segment. Sequences are of events; `offset` and `length` in the file."""

    stream: str
    first_sequence: int
    last_sequence: int
    last_epoch: int
    entries: int
    previous_digest: bytes
    last_digest: bytes
    raw_bytes: int
    offset: int
    length: int
    digest: bytes


class Index(msgspec.Struct, frozen=True, array_like=True):
    """What a segment holds. Parts of one stream stand together, in order."""

    belayer_version: str
    namespace: str
    created_ns: int
    parts: tuple[Part, ...]

    def of(self, stream: StreamId) -> list[Part]:
        """The stream's parts, oldest first."""
        name = str(stream)
        return [part for part in self.parts if part.stream == name]


_index = msgspec.msgpack.Decoder(Index)


class SegmentBuilder:
    """Collects streams and makes a segment's bytes of them."""

    def __init__(self, namespace: str, created_ns: int) -> None:
        self._namespace = namespace
        self._created_ns = created_ns
        self._compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
        self._frames: list[bytes] = []
        self._parts: list[Part] = []
        self.size_bytes = 0

    def add(self, stream: StreamId, entries: Iterable[Entry]) -> None:
        """The stream's next entries, whose chain the caller has checked."""
        group: list[Entry] = []
        group_bytes = 0
        for entry in entries:
            group.append(entry)
            group_bytes += len(entry.body)
            if group_bytes >= PART_BYTES:
                self._add_part(stream, group)
                group, group_bytes = [], 0
        if group:
            self._add_part(stream, group)

    def _add_part(self, stream: StreamId, entries: Sequence[Entry]) -> None:
        first, last = entries[0], entries[-1]
        ends = [decode_entry(stream, entry.epoch, entry.last_sequence, entry.body) for entry in (first, last)]
        raw = _encoder.encode([(entry.epoch, entry.last_sequence, entry.body) for entry in entries])
        frame = self._compressor.compress(raw)
        self._parts.append(
            Part(
                str(stream),
                first.expected_sequence + 1,
                last.last_sequence,
                last.epoch,
                len(entries),
                ends[0][0].previous_digest,
                ends[1][-1].digest,
                len(raw),
                self.size_bytes,
                len(frame),
                digest_of(frame),
            )
        )
        self._frames.append(frame)
        self.size_bytes += len(frame)

    def finish(self) -> bytes:
        """The whole segment."""
        index = Index(__version__, self._namespace, self._created_ns, tuple(self._parts))
        frame = self._compressor.compress(_encoder.encode(index))
        trailer = _TRAILER.pack(len(frame), digest_of(frame), MAGIC)
        return b"".join((*self._frames, frame, trailer))


class Tail(NamedTuple):
    """What the end of a segment says about its index."""

    length: int
    digest: bytes


def read_tail(where: str, end: bytes) -> Tail:
    """Read the trailer, from at least the last TRAILER_BYTES of the segment."""
    if len(end) < TRAILER_BYTES:
        raise ArchiveError(where, f"{len(end)} bytes are no segment")
    length, digest, magic = _TRAILER.unpack(end[-TRAILER_BYTES:])
    if magic != MAGIC:
        raise ArchiveError(where, "it does not end as a segment does: it was cut short, or is something else")
    return Tail(length, digest)


def read_index(where: str, tail: Tail, frame: bytes) -> Index:
    """The index from its frame."""
    if digest_of(frame) != tail.digest:
        raise ArchiveError(where, "its index is damaged: the digest does not fit")
    try:
        return _index.decode(_decompress(frame))
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        raise ArchiveError(where, f"its index cannot be read: {error}") from None


def read_part(where: str, part: Part, frame: bytes) -> list[Entry]:
    """The entries of a part from its frame; ArchiveError when they are not what the index says."""
    where = f"{where}, {part.stream} from sequence {part.first_sequence}"
    if digest_of(frame) != part.digest:
        raise ArchiveError(where, "its bytes are damaged: the digest does not fit")
    try:
        records = _records.decode(_decompress(frame))
        entries = [Entry(epoch, last, count_of(where, body), body) for epoch, last, body in records]
    except (zstandard.ZstdError, msgspec.DecodeError, CodecError) as error:
        raise ArchiveError(where, f"cannot be read: {error}") from None
    if not entries or (entries[0].expected_sequence + 1, entries[-1].last_sequence, len(entries)) != (
        part.first_sequence,
        part.last_sequence,
        part.entries,
    ):
        raise ArchiveError(where, "holds other events than its index says")
    return entries


def _decompress(frame: bytes) -> bytes:
    """One whole frame, whose header says how large the content is: a bomb is refused before it is unpacked."""
    size = zstandard.frame_content_size(frame)
    if not 0 < size < _MOST_PART_BYTES:
        raise zstandard.ZstdError(f"a content of {size} bytes")
    return zstandard.ZstdDecompressor().decompress(frame)
