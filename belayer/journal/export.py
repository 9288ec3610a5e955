"""Streams in one plain file, so that a journal can be carried away and read without Redis.

The file: the 8 bytes of MAGIC, then records. A record is its length and the CRC-32 of its content (each u32,
little-endian), and the content: the msgpack array [stream, epoch, last sequence, body], `body` being the entry as
stored. The last record is the msgpack array [number of entries before it], so a file that was cut anywhere, between
two records too, is known to be. Entries of one stream are in order; streams follow one another. The CRC finds what
disks and copies do to a file; what was changed on purpose shows in the events' own digests.

Reading and writing need the memory of one record. A damaged or truncated file is a CodecError naming file and offset.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from belayer.errors import CodecError, InputError
from belayer.ids import StreamId
from belayer.journal.archive_storage import sync_folder
from belayer.journal.codec import Entry, count_of
from belayer.journal.store import JournalStore
from belayer.journal.writer import check_archived

MAGIC = b"BELAYER1"
_HEADER = struct.Struct("<II")
_ENTRY, _END = b"\x94", b"\x91"
"""The first byte of an entry's record and of the last one: msgpack arrays of four items and of one."""
_NOTHING = b"\xff" * 16
"""What no record begins with."""
_READ_BUFFER_BYTES = 1 << 18
_MAX_RECORD_BYTES = 1 << 30
_PAGE = 256

_encoder = msgspec.msgpack.Encoder()
_entry_decoder = msgspec.msgpack.Decoder(tuple[str, int, int, bytes])
_end_decoder = msgspec.msgpack.Decoder(tuple[int])


class ExportWriter:
    """Writes an export beside its place and puts it there, whole and durable, only when the `with` block succeeds."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._partial = self._path.with_name(f"{self._path.name}.{os.urandom(4).hex()}.partial")
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
        self._file.write(_HEADER.pack(len(content), zlib.crc32(content)))
        self._file.write(content)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._file:
                if error is None:
                    self._record(_encoder.encode((self._entries,)))
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if error is None:
                self._partial.replace(self._path)
                sync_folder(self._path.parent)
        finally:
            self._partial.unlink(missing_ok=True)


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
    """The stream's entries as stored, a page at a time. ArchivedError when only an archive has its beginning."""
    sequence = 0
    while entries := await store.read(stream, sequence, _PAGE):
        check_archived(stream, sequence, entries[0])
        for entry in entries:
            yield entry
        sequence = entries[-1].last_sequence


def read_export(path: Path | str, wanted: Callable[[StreamId], bool] | None = None) -> Iterator[tuple[StreamId, Entry]]:
    """The entries of an export, in the file's order. CodecError where the file is damaged or ends too early.

    With `wanted` only the streams that it accepts; the others are passed over without checking their content.
    """
    path = Path(path)
    try:
        file = path.open("rb", buffering=_READ_BUFFER_BYTES)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    with file:
        if file.read(len(MAGIC)) != MAGIC:
            raise CodecError(f"{path} at byte 0", "not an export of a Belayer journal; make one with `belayer export`")
        offset, entries = len(MAGIC), 0
        name, stream, passed_over = "", None, _NOTHING
        read, unpack, crc32, decode = file.read, _HEADER.unpack, zlib.crc32, _entry_decoder.decode
        while (header := read(_HEADER.size)) != b"":
            length, check = unpack(header) if len(header) == _HEADER.size else (_MAX_RECORD_BYTES, 0)
            content = read(length) if length < _MAX_RECORD_BYTES else b""
            if len(content) != length:
                raise CodecError(f"{path} at byte {offset}", "the file ends within a record; export the journal again")
            if not content.startswith(passed_over):
                if crc32(content) != check:
                    raise CodecError(f"{path} at byte {offset}", "the record is damaged: its checksum does not fit")
                if content.startswith(_END):
                    return _check_end(content, entries, file, f"{path} at byte {offset}")
                try:
                    found, epoch, last_sequence, body = decode(content)
                    if found != name:
                        name, stream = found, StreamId.parse(found)
                        if wanted is not None and not wanted(stream):
                            passed_over, stream = _ENTRY + _encoder.encode(found), None
                    count = count_of(name, body)
                except (msgspec.DecodeError, InputError, CodecError) as error:
                    raise CodecError(f"{path} at byte {offset}", f"not a record of an export: {error}") from None
                if stream is not None:
                    yield stream, Entry(epoch, last_sequence, count, body)
            entries += 1
            offset += _HEADER.size + length
        raise CodecError(f"{path} at byte {offset}", "the file ends too early; export the journal again")


def _check_end(content: bytes, entries: int, file: BinaryIO, where: str) -> None:
    """The end record says how many entries there are, and nothing follows it."""
    try:
        said = _end_decoder.decode(content)[0]
    except msgspec.DecodeError as error:
        raise CodecError(where, f"not a record of an export: {error}") from None
    if said != entries:
        raise CodecError(where, f"holds {entries} entries of {said}")
    if file.read(1):
        raise CodecError(where, "bytes after the end record")
