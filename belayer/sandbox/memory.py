"""The memory of large processes, copied beside CRIU instead of by it, so that they stand frozen for less time.

CRIU copies pages when most of its other work is done, and writes them to files meanwhile. Here a thread reads private
anonymous memory from the moment of the freeze, while CRIU does its other work, into memory that was laid out before;
the files are written after the thaw. CRIU is asked for a dump whose pages are served later (criu(1), --lazy-pages): its
pagemaps then name those pages without holding them.

While CRIU is at work it puts a few instructions into executable memory and takes them back, so such memory is copied
when it is done, and so is what turns out to be missing: the pagemaps say what there must be.

Sources: process_vm_readv(2), proc_pid_mem(5); PAGEMAP_SCAN, Linux Documentation/admin-guide/mm/pagemap.rst.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from belayer.sandbox.lazy import is_worth_it
from belayer.sandbox.limits import Step, unbounded
from belayer.sandbox.pagemap import LAZY, PAGE_BYTES, PRESENT, Messages, Pagemap, pagemaps
from belayer.sandbox.text import rows_of
from belayer.sandbox.tree import status_of

SPARE_BYTES = 16 << 20
"""Laid out beyond what the processes have, since they go on until the freeze."""
CHUNK_BYTES = 8 << 20
AREA_BYTES = 1 << 20
"""Smaller areas are copied when the pagemaps are there: looking at each would take as long."""
MADV_POPULATE_WRITE = 23  # Linux 5.14
SCAN = struct.Struct("8Q4Q")
"""struct pm_scan_arg: size, flags, start, end, walk end, vector, its length, most pages; four masks of categories."""
PAGEMAP_SCAN = 3 << 30 | SCAN.size << 16 | ord("f") << 8 | 16
REGION = struct.Struct("3Q")
REGIONS = 1024
FILE, IN_MEMORY, SWAPPED, ZERO = 1 << 2, 1 << 3, 1 << 4, 1 << 5


class Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_size_t), ("size", ctypes.c_size_t))


@dataclass(slots=True)
class Copied:
    """What has been copied of one process: (start, end, where in the buffer), disjoint."""

    pid: int
    pieces: list[tuple[int, int, int]] = field(default_factory=list)

    def cover(self, start: int, end: int) -> Iterator[tuple[int, int, int | None]]:
        """The range in pieces, in order; None for where there is no copy."""
        for first, last, at in sorted(self.pieces):
            if first < end and last > start:
                if first > start:
                    yield start, first, None
                    start = first
                stop = min(last, end)
                yield start, stop, at + start - first
                start = stop
        if start < end:
            yield start, end, None


class MemoryCopy:
    """One copy: `begin` with the processes frozen, `complete` when CRIU's dump is done, `write` after the thaw.

    A context manager, which lets go of the memory.
    """

    def __init__(self, most_bytes: int, laid_out_bytes: int, step: Step = unbounded) -> None:
        """MemoryError or OSError when there is no memory. `step` is asked before each piece that is copied."""
        self._step = step
        self._buffer = mmap.mmap(-1, most_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # an older kernel: pages are made when they are written to
            self._buffer.madvise(MADV_POPULATE_WRITE, 0, laid_out_bytes // PAGE_BYTES * PAGE_BYTES)
        self._view = memoryview(self._buffer)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._used = 0
        self._processes: dict[int, Copied] = {}
        self._thread = ThreadPoolExecutor(1, "memory")
        self._ahead: Future[None] | None = None
        self._stopped = False

    def __enter__(self) -> MemoryCopy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        self._thread.shutdown()
        self._view.release()
        self._buffer.close()

    def begin(self, pids: Iterable[int]) -> None:
        """Start to copy the memory of the processes (host pids)."""
        self._processes = {int(status["NSpid"].split()[-1]): Copied(pid) for pid in pids if (status := status_of(pid))}
        self._ahead = self._thread.submit(self._copy_ahead)

    def complete(self, images: Path, messages: Messages) -> None:
        """Return once all is there that CRIU's images name and do not hold. OSError when a process does not let it."""
        if self._ahead is not None:
            self._ahead.result()
        for pagemap in pagemaps(images, messages):
            copied = self._processes[pagemap.pid]
            for start, end in _missing(pagemap):
                for first, last, at in list(copied.cover(start, end)):
                    if at is None:
                        self._copy(copied, first, last)

    def write(self, images: Path, messages: Messages) -> None:
        """Put the pages where CRIU would have put them. OSError when an image cannot be written."""
        for pagemap in pagemaps(images, messages):
            new = pagemap.pages.with_suffix(".new")
            with pagemap.pages.open("rb") as theirs, new.open("wb") as ours:
                for entry in pagemap.entries:
                    size = entry.nr_pages * PAGE_BYTES
                    if entry.flags & PRESENT:
                        ours.write(theirs.read(size))
                    elif entry.flags & LAZY:
                        for first, last, at in self._processes[pagemap.pid].cover(entry.vaddr, entry.vaddr + size):
                            assert at is not None, "complete has copied it"
                            for piece in range(at, at + last - first, CHUNK_BYTES):
                                self._step(CHUNK_BYTES)
                                ours.write(self._view[piece : min(piece + CHUNK_BYTES, at + last - first)])
                        entry.flags |= PRESENT
            new.rename(pagemap.pages)
            pagemap.save(pagemap.entries)

    def _copy_ahead(self) -> None:
        for copied in self._processes.values():
            with suppress(OSError):  # what is not there when it is read was CRIU's own
                for start, end in _regions(copied.pid, _areas(copied.pid)):
                    self._copy(copied, start, end)

    def _copy(self, copied: Copied, start: int, end: int) -> None:
        if self._used + end - start > len(self._buffer):
            raise OSError(errno.ENOMEM, f"the memory of process {copied.pid} has grown while it was being frozen")
        while start < end and not self._stopped:
            self._step(CHUNK_BYTES)
            size = self._read(copied.pid, start, min(CHUNK_BYTES, end - start))
            copied.pieces.append((start, start + size, self._used))
            self._used += size
            start += size

    def _read(self, pid: int, start: int, size: int) -> int:
        """Copy up to `size` bytes; how many."""
        here, there = Iovec(self._address + self._used, size), Iovec(start, size)
        read = _libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if read > 0:
            return read
        # Memory without permission to read it is readable through /proc/PID/mem, to those who may trace the process.
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            read = os.preadv(memory.fileno(), [self._view[self._used : self._used + size]], start)
        if read <= 0:
            raise OSError(errno.EFAULT, f"memory of process {pid} at {start:x} cannot be read")
        return read


def room_for(pids: Sequence[int], step: Step = unbounded) -> MemoryCopy | None:
    """A copy of the processes' memory (host pids), laid out now; None when CRIU may as well copy it, or memory is
    short: a quarter of what is free is taken at most."""
    size = sum(_anonymous_bytes(pid) for pid in pids)
    most = size + size // 4 + SPARE_BYTES
    if not is_worth_it([size]) or most > free_bytes() // 4:
        return None
    with suppress(OSError, MemoryError):
        return MemoryCopy(most, size + SPARE_BYTES, step)
    return None


def free_bytes() -> int:
    """Memory that this process can still take, by the machine and by its own cgroup."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) << 10
    for limit, usage in _cgroup_files():
        with suppress(OSError, ValueError):  # "max"
            free = min(free, int(limit.read_text()) - int(usage.read_text()))
    return max(0, free)


def _cgroup_files() -> Iterator[tuple[Path, Path]]:
    """Files with the limit and the usage of memory, of our cgroup and those above it; some may not exist."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        if controllers in ("", "memory"):
            root = Path("/sys/fs/cgroup", controllers)
            folder = root / path.strip("/")
            for each in (folder, *folder.parents):
                if each.is_relative_to(root):
                    yield each / names[0], each / names[1]


def size_of(pids: Iterable[int]) -> int:
    """Bytes of memory, at least, that a dump of the processes (host pids) holds: what is their own, and the most that
    one of them shares."""
    sizes = [(_bytes_of(status, "RssAnon", "VmSwap"), _bytes_of(status, "RssShmem")) for status in map(status_of, pids)]
    return sum(own for own, _ in sizes) + max((shared for _, shared in sizes), default=0)


def _anonymous_bytes(pid: int) -> int:
    return _bytes_of(status_of(pid), "RssAnon", "VmSwap")


def _bytes_of(status: Mapping[str, str], *names: str) -> int:
    return sum(int(status.get(name, "0 kB").split()[0]) << 10 for name in names)


def _missing(pagemap: Pagemap) -> Iterator[tuple[int, int]]:
    for entry in pagemap.entries:
        if entry.flags & LAZY and not entry.flags & PRESENT:
            yield entry.vaddr, entry.vaddr + entry.nr_pages * PAGE_BYTES


def _areas(pid: int) -> Iterator[tuple[int, int]]:
    """Large private anonymous areas that are not executable. proc_pid_maps(5)."""
    for line in rows_of(Path(f"/proc/{pid}/maps")):
        bounds, permissions, _, _, inode, *name = line.split(None, 5)
        start, end = (int(part, 16) for part in bounds.split(b"-"))
        named = name and not name[0].startswith((b"[heap]", b"[stack]", b"[anon"))
        if end - start >= AREA_BYTES and permissions[2:] == b"-p" and inode == b"0" and not named:
            yield start, end


def _regions(pid: int, areas: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Where the areas have pages of their own. OSError where the kernel cannot tell (before Linux 6.7)."""
    vector = ctypes.create_string_buffer(REGION.size * REGIONS)
    with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as file:
        for start, end in areas:
            at = start
            while at < end:
                vector_at = ctypes.addressof(vector)
                masks = (FILE | ZERO, FILE | ZERO, IN_MEMORY | SWAPPED, 0)  # inverted, all of, any of, told
                asked = bytearray(SCAN.pack(SCAN.size, 0, at, end, 0, vector_at, REGIONS, 0, *masks))
                found = fcntl.ioctl(file, PAGEMAP_SCAN, asked)
                for first, last, _ in REGION.iter_unpack(vector.raw[: found * REGION.size]):
                    yield first, last
                at = SCAN.unpack(asked)[4]


_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(Iovec),
    ctypes.c_ulong,
    ctypes.POINTER(Iovec),
    ctypes.c_ulong,
    ctypes.c_ulong,
)
