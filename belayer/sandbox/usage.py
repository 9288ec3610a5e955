"""How much of the disk each checkpoint takes, told by inodes and their link counts.

Nothing is locked: what is being made or removed meanwhile is counted as far as it is seen.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from belayer.sandbox.captured import opened
from belayer.sandbox.home import Home
from belayer.sandbox.scan import scan

BLOCK_BYTES = 512
"""The unit of st_blocks."""


@dataclass(frozen=True, slots=True)
class Usage:
    """One checkpoint's files. `alone_bytes` would be freed if it were removed; the rest others hold too."""

    bytes: int
    alone_bytes: int


@dataclass(frozen=True, slots=True)
class Disk:
    """All published checkpoints; `bytes` is what they and the blobs take together, each inode counted once."""

    checkpoints: dict[str, Usage]
    bytes: int
    blobs: int
    blobs_bytes: int
    unheld_bytes: int
    """Of blobs that no checkpoint holds: the next sweep frees them."""


def disk(home: Home) -> Disk:
    """PermissionError when we are not root."""
    blobs = {found.st_ino: found for found in _files(home.root / "blobs")}
    seen = dict(blobs)
    checkpoints: dict[str, Usage] = {}
    for name in home.published():
        here = list(_files(home.checkpoint(name)))
        inodes = {found.st_ino: found for found in here}
        seen |= inodes
        links = {inode: 1 if inode in blobs else 0 for inode in inodes}
        for found in here:
            links[found.st_ino] += 1
        alone = [found for inode, found in inodes.items() if found.st_nlink <= links[inode]]
        checkpoints[name] = Usage(_size(inodes.values()), _size(alone))
    return Disk(
        checkpoints,
        _size(seen.values()),
        len(blobs),
        _size(blobs.values()),
        _size(found for found in blobs.values() if found.st_nlink == 1),
    )


def _files(folder: Path) -> Iterator[os.stat_result]:
    with suppress(FileNotFoundError), opened(folder) as root:
        yield from (found for found in scan(root, moving=True).values() if stat.S_ISREG(found.st_mode))


def _size(files: Iterable[os.stat_result]) -> int:
    return sum(found.st_blocks * BLOCK_BYTES for found in files)
