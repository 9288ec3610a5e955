"""Says in CRIU's images which pages may come later and which must be there when a process first runs.

While a page is missing, /proc/PID/cmdline and environ of another process read as empty instead of waiting for it, so
`ps` right after a lazy restore would not know its processes. Pages with arguments and environment are therefore marked
as not lazy, and so is the whole memory of small processes, the runner among them: it answers at once. An entry of a
pagemap may be split for this, and no page moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from belayer.sandbox.pagemap import LAZY, PAGE_BYTES, Messages, Pagemap, pagemaps, parts

SMALL_BYTES = 16 << 20


def keep_eager(images: Path, messages: Messages) -> None:
    """Rewrite the pagemaps of all processes. OSError when an image cannot be read or written."""
    for pagemap in pagemaps(images, messages):
        mm = messages.mm_entry.FromString(next(parts((images / f"mm-{pagemap.pid}.img").read_bytes())))
        eager = _eager(pagemap, mm)
        pagemap.save(part for entry in pagemap.entries for part in _split(entry, eager, messages))


def _eager(pagemap: Pagemap, mm: Any) -> range:
    """The addresses whose pages must be there from the start."""
    if sum(entry.nr_pages for entry in pagemap.entries if entry.flags & LAZY) * PAGE_BYTES <= SMALL_BYTES:
        return range(0, 1 << 64)
    first = min(mm.mm_arg_start, mm.mm_env_start) // PAGE_BYTES * PAGE_BYTES
    last = -(-max(mm.mm_arg_end, mm.mm_env_end) // PAGE_BYTES) * PAGE_BYTES
    return range(first, last)


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
