"""How what a container has made is opened: no link is followed, and nothing is opened before it is known what it is.

Opening a device or a FIFO does something. So an entry is first only named (O_PATH), then looked at, and then what was
named is opened: it cannot have become another. Folders need no such look, because O_DIRECTORY opens nothing else.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NAMED = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FOLDERS = 64
MOVED = frozenset(
    (
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.EINVAL,  # readlink(2) of what is no link any more
        errno.ENXIO,
        errno.ENODATA,
        errno.ERANGE,  # an xattr that has grown
        errno.ESTALE,
    )
)
"""What may be said of an entry that somebody removes or replaces while it is looked at."""


@contextmanager
def unless_moved() -> Iterator[None]:
    """Leave at an error that only says that an entry is another than before, or gone."""
    try:
        yield
    except OSError as error:
        if error.errno not in MOVED:
            raise


def open_node(folder: int, name: str | bytes, is_kind: Callable[[int], bool], flags: int = os.O_RDONLY) -> int:
    """An entry of a folder, opened if its mode is of that kind; OSError (ESTALE) when it is another."""
    named = os.open(name, NAMED, dir_fd=folder)
    try:
        if not is_kind(os.fstat(named).st_mode):
            raise OSError(errno.ESTALE, "it is something else than it should be", name)
        return os.open(f"/proc/self/fd/{named}", flags | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(named)


def open_file(folder: int, name: str | bytes) -> int:
    """A regular file of a folder, for reading; OSError when it is anything else."""
    return open_node(folder, name, stat.S_ISREG)


@contextmanager
def parent_of(root: int, path: bytes) -> Iterator[tuple[int, bytes]]:
    """The folder that holds the entry, and the entry's name in it. OSError when a part is missing or a link."""
    *folders, name = path.split(b"/")
    here = os.dup(root)
    try:
        for folder in folders:
            below = os.open(folder, FOLDER, dir_fd=here)
            os.close(here)
            here = below
        yield here, name
    finally:
        os.close(here)


class Folders:
    """The folders below an open one, each opened from its parent. The last few on the way to the last one stay open:
    in the order of a scan each folder is opened about once, whatever the tree is like."""

    def __init__(self, root: int) -> None:
        """`root` stays the caller's."""
        self._root = root
        self._open: list[tuple[bytes, int]] = []
        """Prefix (the path and a slash) and descriptor; each lies below the one before it."""

    def __enter__(self) -> Folders:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def at(self, path: bytes) -> int:
        """The folder, open until another is asked for; empty: the root. OSError when a part is missing or a link."""
        prefix = path + b"/"
        while self._open and not prefix.startswith(self._open[-1][0]):
            os.close(self._open.pop()[1])
        known, here = self._open[-1] if self._open else (b"", self._root)
        if path and known != prefix:
            for name in path[len(known) :].split(b"/"):
                here = os.open(name, FOLDER, dir_fd=here)
                known += name + b"/"
                self._open.append((known, here))
                if len(self._open) > OPEN_FOLDERS:
                    os.close(self._open.pop(0)[1])
        return here

    def holding(self, path: bytes) -> tuple[int, bytes]:
        """The folder that holds the entry, open until another is asked for, and the entry's name in it."""
        folder, _, name = path.rpartition(b"/")
        return self.at(folder), name

    def close(self) -> None:
        """Those that are open."""
        while self._open:
            os.close(self._open.pop()[1])
