"""CRIU's pagemaps: which pages of a process its images hold, in the order in which the pages file has them.

Format: criu, images/pagemap.proto and criu/include/magic.h. Two magic numbers, then messages, each preceded by its
size: a head that names the pages file, and entries in the order of their pages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

PAGE_BYTES = 4096
LAZY = 1 << 1
PRESENT = 1 << 2
MAGICS_BYTES = 8


class Messages(Protocol):
    """pycriu's classes that are needed here."""

    @property
    def pagemap_head(self) -> Any: ...
    @property
    def pagemap_entry(self) -> Any: ...
    @property
    def mm_entry(self) -> Any: ...


class Pagemap:
    """One process's, read from its file. OSError when that cannot be read."""

    def __init__(self, path: Path, messages: Messages) -> None:
        self._path = path
        data = path.read_bytes()
        self._magics = data[:MAGICS_BYTES]
        self._head, *bodies = parts(data)
        self.entries = [messages.pagemap_entry.FromString(body) for body in bodies]
        self.pages = path.with_name(f"pages-{messages.pagemap_head.FromString(self._head).pages_id}.img")

    @property
    def pid(self) -> int:
        """The process, as the container sees it."""
        return int(self._path.stem.removeprefix("pagemap-"))

    def save(self, entries: Iterable[Any]) -> None:
        """Rewrite the file. OSError when that fails."""
        messages = [self._head, *(entry.SerializeToString() for entry in entries)]
        self._path.write_bytes(self._magics + b"".join(struct.pack("<I", len(one)) + one for one in messages))


def pagemaps(images: Path, messages: Messages) -> Iterator[Pagemap]:
    """Those of processes; shared memory has its own, whose pages never come later."""
    for path in images.glob("pagemap-[0-9]*.img"):
        yield Pagemap(path, messages)


def parts(image: bytes) -> Iterator[bytes]:
    """The messages of an image."""
    at = MAGICS_BYTES
    while at < len(image):
        (size,) = struct.unpack_from("<I", image, at)
        yield image[at + 4 : at + 4 + size]
        at += 4 + size
