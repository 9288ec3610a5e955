"""What an engine knows about its KV cache, written after each step into memory that outlives it.

Layout, little endian: a header page of 64-bit words, then one 64-byte entry a row of the slot table, then each row's
token ids as 64-bit integers. An entry says: the KV of the first `length - 1` tokens of this row is complete, in the
slots that the slot table names. (The last token was sampled from that KV; its own comes with the next step.)

Invariant: an entry is read only if its sequence is even, the same before and after, and of the epoch asked for. A
writer that dies in the middle of one leaves it odd: unproven, never wrong. Rows are invalidated before their slots
may be used again. One process writes; nobody takes a lock.
"""

from __future__ import annotations

import hashlib
import mmap
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from belayer.gpu.errors import GeometryMismatchError

MAGIC = 0x42454C4159455231
VERSION = 1
_HEADER_BYTES = 4096
_ENTRY_WORDS = 8

_W_MAGIC, _W_VERSION, _W_ROWS, _W_WIDTH, _W_EPOCH = range(5)
_W_STEPS_BEGUN, _W_STEPS_ENDED, _W_TOKENS_IN_FLIGHT, _W_BEAT_NS, _W_SERVING = range(8, 13)
_E_SEQUENCE, _E_LENGTH, _E_EPOCH, _E_REQUEST, _E_WEIGHT_VERSION = range(5)


@dataclass(frozen=True, slots=True)
class Entry:
    """A proven row: its slot table row, the request's digest, all token ids, and how many have their KV."""

    row: int
    request: int
    token_ids: array[int]
    proven: int
    weight_version: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the engine is. `beat_ns` is CLOCK_MONOTONIC of the last sign of life."""

    epoch: int
    serving: bool
    steps_begun: int
    steps_ended: int
    tokens_in_flight: int
    beat_ns: int


def ledger_bytes(rows: int, width: int) -> int:
    """Its size. Most of it stays unused, and so costs nothing."""
    return _HEADER_BYTES + rows * _ENTRY_WORDS * 8 + rows * width * 8


def request_digest(request: str) -> int:
    """63 bits that stand for a request id."""
    return int.from_bytes(hashlib.blake2b(request.encode(), digest_size=8).digest(), "little") >> 1


class Ledger:
    """One ledger, mapped from a descriptor, which it does not take over."""

    def __init__(self, fd: int, rows: int, width: int) -> None:
        size_bytes = ledger_bytes(rows, width)
        self._memory = mmap.mmap(fd, size_bytes)
        view = memoryview(self._memory)
        entries_end = _HEADER_BYTES + rows * _ENTRY_WORDS * 8
        self._header = view[:_HEADER_BYTES].cast("q")
        self._entries = view[_HEADER_BYTES:entries_end].cast("q")
        self._tokens = view[entries_end:size_bytes].cast("q")
        self.rows, self.width = rows, width
        self._view = view
        if self._header[_W_MAGIC] == 0:
            self._header[_W_VERSION], self._header[_W_ROWS], self._header[_W_WIDTH] = VERSION, rows, width
            self._header[_W_MAGIC] = MAGIC
        expectations = ((_W_VERSION, "version", VERSION), (_W_ROWS, "rows", rows), (_W_WIDTH, "width", width))
        for word, field, expected in expectations:
            if self._header[word] != expected:
                raise GeometryMismatchError("ledger", field, self._header[word], expected)

    def close(self) -> None:
        for view in (self._header, self._entries, self._tokens, self._view):
            view.release()
        self._memory.close()

    # --- the engine's side --------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        """Start writing under a lease: entries of earlier epochs count no more. Read them first."""
        header = self._header
        header[_W_STEPS_BEGUN] = header[_W_STEPS_ENDED] = header[_W_TOKENS_IN_FLIGHT] = 0
        header[_W_EPOCH] = epoch
        self.beat()
        header[_W_SERVING] = 1

    def excuse(self, silent: bool) -> None:
        """The loop will be silent for as long as it takes (a weight update), or is back."""
        self.beat()
        self._header[_W_SERVING] = 0 if silent else 1

    def beat(self) -> None:
        """The scheduler's loop is alive."""
        self._header[_W_BEAT_NS] = time.monotonic_ns()

    def begin_step(self, tokens: int) -> None:
        """A forward pass over that many tokens is about to start."""
        header = self._header
        header[_W_TOKENS_IN_FLIGHT] += tokens
        header[_W_BEAT_NS] = time.monotonic_ns()
        header[_W_STEPS_BEGUN] += 1

    def end_step(self, tokens: int) -> None:
        """Its results are on the host."""
        header = self._header
        header[_W_STEPS_ENDED] += 1
        header[_W_TOKENS_IN_FLIGHT] -= tokens
        header[_W_BEAT_NS] = time.monotonic_ns()

    def write(self, row: int, request: int, start: int, token_ids: Sequence[int], weight_version: int) -> None:
        """The row's tokens from `start` on are these; with `start` 0 it is a new request's."""
        at = row * _ENTRY_WORDS
        entries = self._entries
        epoch = self._header[_W_EPOCH]
        entries[at + _E_SEQUENCE] |= 1
        first = row * self.width + start
        if len(token_ids) == 1:
            self._tokens[first] = token_ids[0]
        else:
            self._tokens[first : first + len(token_ids)] = array("q", token_ids)
        entries[at + _E_LENGTH] = start + len(token_ids)
        entries[at + _E_EPOCH] = epoch
        entries[at + _E_REQUEST] = request
        entries[at + _E_WEIGHT_VERSION] = weight_version
        entries[at + _E_SEQUENCE] += 1

    def invalidate(self, row: int) -> None:
        """The row's slots may be used for something else from now on."""
        self._entries[row * _ENTRY_WORDS + _E_LENGTH] = 0

    def invalidate_all(self) -> None:
        for row in range(self.rows):
            self.invalidate(row)

    # --- the reader's side --------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The lease under which it was last written; 0 when it never was."""
        return self._header[_W_EPOCH]

    def progress(self) -> Progress:
        header = self._header
        return Progress(
            header[_W_EPOCH],
            header[_W_SERVING] == 1,
            header[_W_STEPS_BEGUN],
            header[_W_STEPS_ENDED],
            header[_W_TOKENS_IN_FLIGHT],
            header[_W_BEAT_NS],
        )

    def proven(self, epoch: int) -> Iterator[Entry]:
        """The entries that this epoch's writer completed. Call it when the writer is dead."""
        for row in range(self.rows):
            if (entry := self._read(row, epoch)) is not None:
                yield entry

    def _read(self, row: int, epoch: int) -> Entry | None:
        at = row * _ENTRY_WORDS
        entries = self._entries
        sequence, length = entries[at + _E_SEQUENCE], entries[at + _E_LENGTH]
        if sequence & 1 or entries[at + _E_EPOCH] != epoch or not 1 < length <= self.width:
            return None
        first = row * self.width
        token_ids = array("q")
        token_ids.frombytes(self._tokens[first : first + length].tobytes())
        request, version = entries[at + _E_REQUEST], entries[at + _E_WEIGHT_VERSION]
        if (entries[at + _E_SEQUENCE], entries[at + _E_LENGTH]) != (sequence, length):
            return None
        return Entry(row, request, token_ids, length - 1, version)
