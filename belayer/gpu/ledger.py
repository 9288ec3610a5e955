"""What an engine knows about its KV cache, written before each token goes out, in memory that outlives the engine.

Layout, little endian: a header page of 64-bit words with the bell in its second half; the reserved slots, one word
each; one 64-byte entry a row of the slot table; each row's token ids, one word each. An entry says: the KV of the
first `length - 1` tokens of this row is complete, in the slots that the slot table names. (The last token was sampled
from that KV; its own comes with the next step.)

Invariant: an entry counts only if its sequence is even and it is of the epoch asked for. A writer that dies while it
begins one leaves it odd, and one that dies while it adds tokens leaves it as it was, because the length is stored last:
unproven, never wrong. A row is invalidated before its slots may be used again. One
process writes; nobody takes a lock; whoever reads does so when the writer's scheduler is dead.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from belayer.gpu.bell import BELL_BYTES, Bell
from belayer.gpu.errors import GeometryMismatchError

MAGIC = 0x42454C4159455232
VERSION = 2
MAX_RESERVE = 8192

_HEADER_BYTES = 4096
_BELL_AT = 2048
_ENTRY_WORDS = 8
_W_MAGIC, _W_VERSION, _W_ROWS, _W_WIDTH, _W_EPOCH, _W_RESERVED = range(6)
_W_STEPS_BEGUN, _W_STEPS_ENDED, _W_TOKENS_IN_FLIGHT, _W_BEAT_NS, _W_SERVING, _W_UPDATE_NS = range(8, 14)
_E_SEQUENCE, _E_LENGTH, _E_EPOCH, _E_REQUEST, _E_WEIGHT_VERSION = range(5)
_SERVING, _UPDATING = 1, 2
assert _BELL_AT + BELL_BYTES <= _HEADER_BYTES

_armed: list[mmap.mmap] = []
"""What must stay mapped, also when its ledger is forgotten: its bell is in the list of the thread that armed it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A proven row: its row in the slot table, the request's digest, all token ids, and how many have their KV."""

    row: int
    request: int
    token_ids: array[int]
    proven: int
    weight_version: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the engine is. `beat_ns` is CLOCK_MONOTONIC of the last sign of life; `updating`: in a call of a weight
    update; `update_ns`: when the last such call began or ended, 0 when there was none.
    """

    epoch: int
    serving: bool
    updating: bool
    steps_begun: int
    steps_ended: int
    tokens_in_flight: int
    beat_ns: int
    update_ns: int


def ledger_bytes(rows: int, width: int) -> int:
    """Its size. Most of it stays unused, and so costs nothing."""
    return _HEADER_BYTES + 8 * (MAX_RESERVE + rows * _ENTRY_WORDS + rows * width)


def request_digest(request: str) -> int:
    """63 bits that stand for a request id."""
    return int.from_bytes(hashlib.blake2b(request.encode(), digest_size=8).digest(), "little") >> 1


class Ledger:
    """One ledger, mapped from a descriptor, which it does not take over."""

    def __init__(self, fd: int, rows: int, width: int, *, writable: bool = True) -> None:
        size_bytes = ledger_bytes(rows, width)
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._memory = mmap.mmap(fd, size_bytes, access=access)
        self._view = view = memoryview(self._memory)
        reserve_end = _HEADER_BYTES + 8 * MAX_RESERVE
        entries_end = reserve_end + 8 * rows * _ENTRY_WORDS
        self._header = view[:_BELL_AT].cast("q")
        self._reserve = view[_HEADER_BYTES:reserve_end].cast("q")
        self._entries = view[reserve_end:entries_end].cast("q")
        self._tokens = view[entries_end:size_bytes].cast("q")
        self.rows, self.width = rows, width
        if self._header[_W_MAGIC] == 0 and writable:
            self._header[_W_VERSION], self._header[_W_ROWS], self._header[_W_WIDTH] = VERSION, rows, width
            self._header[_W_MAGIC] = MAGIC
        expectations = ((_W_VERSION, "version", VERSION), (_W_ROWS, "rows", rows), (_W_WIDTH, "width", width))
        for word, field, expected in expectations:
            if self._header[word] != expected:
                raise GeometryMismatchError("ledger", field, self._header[word], expected)
        self._reserve_due: tuple[int, int] | None = None
        """How many slots are reserved once so many steps have ended."""

    @property
    def bell(self) -> Bell:
        """The holder's bell; of a ledger mapped for writing."""
        return Bell(ctypes.addressof(ctypes.c_char.from_buffer(self._memory, _BELL_AT)))

    def close(self) -> None:
        self._disarm()
        for view in (self._header, self._reserve, self._entries, self._tokens, self._view):
            view.release()
        self._memory.close()

    def _disarm(self) -> None:
        if self._memory in _armed:
            self.bell.disarm()
            _armed.remove(self._memory)

    # --- the engine's side --------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        """Start writing under a lease, in the thread whose death the bell shall tell of."""
        header = self._header
        header[_W_SERVING] = header[_W_RESERVED] = 0
        self._reserve_due = None
        header[_W_STEPS_BEGUN] = header[_W_STEPS_ENDED] = header[_W_TOKENS_IN_FLIGHT] = header[_W_UPDATE_NS] = 0
        header[_W_EPOCH] = epoch
        self._disarm()
        _armed.append(self._memory)
        self.bell.arm()
        self.beat()
        header[_W_SERVING] = _SERVING

    def beat(self) -> None:
        """The scheduler's loop is alive."""
        self._header[_W_BEAT_NS] = time.monotonic_ns()

    def excuse(self, silent: bool) -> None:
        """The loop will be silent for as long as a weight update takes, or is back."""
        self.beat()
        self._header[_W_UPDATE_NS] = self._header[_W_BEAT_NS]
        self._header[_W_SERVING] = _UPDATING if silent else _SERVING

    def begin_step(self, tokens: int) -> None:
        """A forward pass is about to start that prefills so many tokens; 0 for a decode step."""
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
        self._say_reserve()

    def reserve(self, slots: Sequence[int]) -> None:
        """These slots are not written by this holder any more: the next one may use them before this one is dead.

        Said once the steps that are in flight now have ended. SGLang frees a finished request's slots while a step that
        writes to the last of them may still run, so one that has just been taken aside may be such a slot.
        """
        self._header[_W_RESERVED] = 0
        self._reserve[: len(slots)] = array("q", slots)
        self._reserve_due = len(slots), self._header[_W_STEPS_BEGUN]
        self._say_reserve()

    def _say_reserve(self) -> None:
        if self._reserve_due is not None and self._header[_W_STEPS_ENDED] >= self._reserve_due[1]:
            self._header[_W_RESERVED], self._reserve_due = self._reserve_due[0], None

    def write(self, row: int, request: int, start: int, token_ids: Sequence[int], weight_version: int) -> None:
        """The row's tokens from `start` on are these; with `start` 0 it is a new request's."""
        at = row * _ENTRY_WORDS
        entries = self._entries
        begins = start == 0 or entries[at + _E_WEIGHT_VERSION] != weight_version
        if begins:
            entries[at + _E_SEQUENCE] |= 1
        first = row * self.width + start
        if len(token_ids) == 1:
            self._tokens[first] = token_ids[0]
        else:
            self._tokens[first : first + len(token_ids)] = array("q", token_ids)
        entries[at + _E_LENGTH] = start + len(token_ids)
        if not begins:
            return
        entries[at + _E_EPOCH] = self._header[_W_EPOCH]
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
            header[_W_SERVING] != 0,
            header[_W_SERVING] == _UPDATING,
            header[_W_STEPS_BEGUN],
            header[_W_STEPS_ENDED],
            header[_W_TOKENS_IN_FLIGHT],
            header[_W_BEAT_NS],
            header[_W_UPDATE_NS],
        )

    def reserved(self, epoch: int) -> array[int]:
        """The slots that the epoch's holder does not write."""
        count = self._header[_W_RESERVED] if self.epoch == epoch else 0
        slots = array("q")
        slots.frombytes(self._reserve[:count].tobytes())
        return slots

    def proven(self, epoch: int) -> Iterator[Entry]:
        """The entries that this epoch's writer completed."""
        for row in range(self.rows if self.epoch == epoch else 0):
            if (entry := self._read(row, epoch)) is not None:
                yield entry

    def _read(self, row: int, epoch: int) -> Entry | None:
        at = row * _ENTRY_WORDS
        entries = self._entries
        length = entries[at + _E_LENGTH]
        if not 1 < length <= self.width or entries[at + _E_SEQUENCE] & 1 or entries[at + _E_EPOCH] != epoch:
            return None
        first = row * self.width
        token_ids = array("q")
        token_ids.frombytes(self._tokens[first : first + length].tobytes())
        return Entry(row, entries[at + _E_REQUEST], token_ids, length - 1, entries[at + _E_WEIGHT_VERSION])
