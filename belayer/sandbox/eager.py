"""Says in CRIU's images which pages may come later and which must be there when a process first runs.

While a page is missing, /proc/PID/cmdline and environ of another process read as empty instead of waiting for it, so
`ps` right after a lazy restore would not know its processes. Pages with arguments and environment are therefore marked
as not lazy, and so is the whole memory of small processes, the runner among them: it answers at once.

Format: criu, images/pagemap.proto and mm.proto; criu/include/magic.h. A pagemap is a head and entries in the order of
their pages, so an entry may be split, and no page moves.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

PAGE_BYTES = 4096
LAZY = 1 << 1
SMALL_BYTES = 16 << 20
COMMON_MAGICS_BYTES = 8


class Messages(Protocol):
    """pycriu's classes that are needed here."""

    @property
    def pagemap_entry(self) -> Any: ...
    @property
    def mm_entry(self) -> Any: ...


def keep_eager(images: Path, messages: Messages) -> None:
    """Rewrite the pagemaps of all processes. OSError when an image cannot be read or written."""
    for path in images.glob("pagemap-[0-9]*.img"):
        memory = images / f"mm-{path.stem.removeprefix('pagemap-')}.img"
        if memory.exists():  # shared memory has none, and is never lazy
            _rewrite(path, memory, messages)


def _rewrite(path: Path, memory: Path, messages: Messages) -> None:
    data = path.read_bytes()
    head, *bodies = _parts(data)
    mm = messages.mm_entry.FromString(next(_parts(memory.read_bytes())))
    entries = [messages.pagemap_entry.FromString(body) for body in bodies]
    small = sum(entry.nr_pages for entry in entries if entry.flags & LAZY) * PAGE_BYTES <= SMALL_BYTES
    first = min(mm.mm_arg_start, mm.mm_env_start) // PAGE_BYTES * PAGE_BYTES
    last = -(-max(mm.mm_arg_end, mm.mm_env_end) // PAGE_BYTES) * PAGE_BYTES
    eager = range(0, 1 << 64) if small else range(first, last)
    parts = [head, *(part.SerializeToString() for entry in entries for part in _split(entry, eager, messages))]
    path.write_bytes(data[:COMMON_MAGICS_BYTES] + b"".join(struct.pack("<I", len(part)) + part for part in parts))


def _split(entry: Any, eager: range, messages: Messages) -> Iterator[Any]:
    """The entry, in up to three parts of which the one in the eager range is not lazy."""
    start, end = entry.vaddr, entry.vaddr + entry.nr_pages * PAGE_BYTES
    cuts = sorted({start, end, *(cut for cut in (eager.start, eager.stop) if start < cut < end)})
    for here, there in itertools.pairwise(cuts):
        part = messages.pagemap_entry.FromString(entry.SerializeToString())
        part.vaddr = here
        part.nr_pages = (there - here) // PAGE_BYTES
        if part.HasField("compat_nr_pages"):
            part.compat_nr_pages = part.nr_pages
        if eager.start <= here and there <= eager.stop:
            part.flags &= ~LAZY
        yield part


def _parts(data: bytes) -> Iterator[bytes]:
    """The messages of an image: each is preceded by its size."""
    at = COMMON_MAGICS_BYTES
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        yield data[at + 4 : at + 4 + size]
        at += 4 + size
