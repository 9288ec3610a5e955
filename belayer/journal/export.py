"""Streams in one plain file, so that a journal can be carried away and read without Redis.

The file: the 8 bytes of MAGIC, then records. A record is its length (u32, little-endian), the first 8 bytes of the
blake2b of its content, and the content: the msgpack array [stream, epoch, last sequence, body], `body` being the entry
as stored. The last record is the msgpack array [number of entries before it], so a file that was cut anywhere,
between two records too, is known to be. Entries of one stream are in order; streams follow one another.

Reading and writing need the memory of one record. A damaged or truncated file is a CodecError naming file and offset.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from belayer.errors import CodecError, InputError
from belayer.ids import StreamId
from belayer.journal.codec import Entry, split_entry
from belayer.journal.store import JournalStore

MAGIC = b"BELAYER1"
_HEADER = struct.Struct("<I8s")
_MAX_RECORD_BYTES = 1 << 30
_PAGE = 256

_encoder = msgspec.msgpack.Encoder()
_entry_decoder = msgspec.msgpack.Decoder(tuple[str, int, int, bytes])
_end_decoder = msgspec.msgpack.Decoder(tuple[int])


class ExportWriter:
    """Writes an export beside its place and puts it there, whole and durable, only when the `with` block succeeds."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._partial = self._path.with_name(self._path.name + ".partial")
        self._entries = 0
        self._file: BinaryIO

    def __enter__(self) -> ExportWriter:
        try:
            self._file = self._partial.open("wb")
        except OSError as error:
            raise InputError(f"cannot write {self._partial}: {error.strerror}; choose another place") from None
        self._file.write(MAGIC)
        return self

    def add(self, stream: StreamId, entry: Entry) -> None:
        """The stream's next entry."""
        self._record(_encoder.encode((str(stream), entry.epoch, entry.last_sequence, entry.body)))
        self._entries += 1

    def _record(self, content: bytes) -> None:
        self._file.write(_HEADER.pack(len(content), _check(content)))
        self._file.write(content)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error is None:
                self._record(_encoder.encode((self._entries,)))
                self._file.flush()
                os.fsync(self._file.fileno())
        if error is None:
            self._partial.replace(self._path)
        else:
            self._partial.unlink()


async def export_streams(store: JournalStore, streams: Iterable[StreamId], path: Path | str) -> int:
    """Write the streams as they are now to one file; how many entries. Nothing is left at `path` when it fails."""
    count = 0
    with ExportWriter(path) as writer:
        for stream in streams:
            async for entry in read_entries(store, stream):
                writer.add(stream, entry)
                count += 1
    return count


async def read_entries(store: JournalStore, stream: StreamId) -> AsyncIterator[Entry]:
    """The stream's entries as stored, a page at a time."""
    sequence = 0
    while entries := await store.read(stream, sequence, _PAGE):
        for entry in entries:
            yield entry
        sequence = entries[-1].last_sequence


def read_export(path: Path | str) -> Iterator[tuple[StreamId, Entry]]:
    """The entries of an export, in the file's order. CodecError where the file is damaged or ends too early."""
    path = Path(path)
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    with file:
        if file.read(len(MAGIC)) != MAGIC:
            raise CodecError(f"{path} at byte 0", "not an export of a Belayer journal; make one with `belayer export`")
        entries = 0
        offset = file.tell()
        while (content := _read_record(file, path, offset)) is not None:
            found = _decode_record(content, f"{path} at byte {offset}")
            offset = file.tell()
            if isinstance(found, int):
                if found != entries:
                    raise CodecError(f"{path} at byte {offset}", f"holds {entries} entries of {found}")
                if file.read(1):
                    raise CodecError(f"{path} at byte {offset}", "bytes after the end record")
                return
            entries += 1
            yield found
        raise CodecError(f"{path} at byte {offset}", "the file ends too early; export the journal again")


def _read_record(file: BinaryIO, path: Path, offset: int) -> bytes | None:
    header = file.read(_HEADER.size)
    if not header:
        return None
    if len(header) == _HEADER.size:
        length, check = _HEADER.unpack(header)
        if length > _MAX_RECORD_BYTES:
            raise CodecError(f"{path} at byte {offset}", f"a record of {length} bytes is not one of ours")
        content = file.read(length)
        if len(content) == length:
            if _check(content) != check:
                raise CodecError(f"{path} at byte {offset}", "the record's digest does not fit its content")
            return content
    raise CodecError(f"{path} at byte {offset}", "the file ends within a record; export the journal again")


def _decode_record(content: bytes, where: str) -> tuple[StreamId, Entry] | int:
    """An entry with its stream, or the number of entries that the end record says."""
    try:
        if content[:1] == b"\x91":
            return _end_decoder.decode(content)[0]
        name, epoch, last_sequence, body = _entry_decoder.decode(content)
        stream = StreamId.parse(name)
    except (msgspec.DecodeError, InputError) as error:
        raise CodecError(where, f"not a record of an export: {error}") from None
    return stream, Entry(epoch, last_sequence, len(split_entry(stream, epoch, last_sequence, body)), body)


def _check(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()
