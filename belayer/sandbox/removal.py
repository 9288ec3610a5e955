"""Trees removed, however deep and wide: nothing recurses, and three descriptors are open whatever the tree is.

A container may have made the tree, so no link is followed: a folder is opened from its parent, and left by `..`, which
must be the folder that it was entered from.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from belayer.sandbox.folders import FOLDER

TRIES = 3
"""Somebody else may be removing the same tree, or still be writing to it."""


def remove_tree(folder: Path) -> None:
    """Remove a folder and all below. Nothing there, or another removing it too, is fine. OSError when it stays."""
    for tries_left in reversed(range(TRIES)):
        try:
            parent = os.open(folder.parent, FOLDER & ~os.O_NOFOLLOW)  # ours
        except FileNotFoundError:
            return
        try:
            remove_entry(parent, os.fsencode(folder.name))
            return
        except OSError:
            if tries_left == 0:
                raise
        finally:
            os.close(parent)


def remove_entry(target: int, name: bytes) -> None:
    """Remove an entry, with all below it. Nothing there is fine. OSError when something in it cannot be removed."""
    try:
        os.unlink(name, dir_fd=target)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        with suppress(FileNotFoundError):
            _empty(target, name)
            os.rmdir(name, dir_fd=target)


def _empty(target: int, name: bytes) -> None:
    here = os.open(name, FOLDER, dir_fd=target)
    try:
        above: list[tuple[bytes, tuple[int, int], list[bytes]]] = []  # the way back, and what is left to do there
        left = _unlink_files(here)
        while left or above:
            if left:
                name = left.pop()
                try:
                    below = os.open(name, FOLDER, dir_fd=here)
                except FileNotFoundError:
                    continue
                above.append((name, _identity(here), left))
                os.close(here)
                here = below
                left = _unlink_files(here)
            else:
                name, parent, left = above.pop()
                up = os.open("..", FOLDER, dir_fd=here)
                os.close(here)
                here = up
                if _identity(here) != parent:
                    raise OSError(errno.ESTALE, "a folder was moved while it was being removed", name)
                with suppress(FileNotFoundError):
                    os.rmdir(name, dir_fd=here)
    finally:
        os.close(here)


def _unlink_files(folder: int) -> list[bytes]:
    """Remove all but folders; those."""
    with os.scandir(folder) as entries:
        found = {os.fsencode(entry.name): entry.is_dir(follow_symlinks=False) for entry in entries}
    for name, is_folder in found.items():
        if not is_folder:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
    return [name for name, is_folder in found.items() if is_folder]


def _identity(folder: int) -> tuple[int, int]:
    found = os.fstat(folder)
    return found.st_dev, found.st_ino
