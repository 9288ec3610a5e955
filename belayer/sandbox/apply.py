"""A captured layer put into a running container that waits for it, through its own merged root.

Whiteouts become removals and opaque folders are emptied first, so that the container sees what the captured one saw.
Nobody but the waiting runner is in there yet; all the same no link of the layer or the image is followed.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from belayer.sandbox.folders import FOLDER, Folders, parent_of
from belayer.sandbox.layer import in_folders
from belayer.sandbox.removal import remove_entry
from belayer.sandbox.scan import (
    Scan,
    copy_entry,
    copy_metadata,
    copy_root_metadata,
    copy_root_xattrs,
    copy_xattrs_of,
    scan,
)

OPAQUE = "trusted.overlay.opaque"
OUR_MOUNTS = frozenset((b".belayer", b".belayer/control", b".belayer/runner.py"))
"""Docker leaves the mount points of our folder in every layer; they are there already."""


def apply(saved: Path, root: Path) -> None:
    """Make the container whose root is seen at `root` hold what the layer says. OSError when it cannot."""
    source = os.open(saved, FOLDER)
    try:
        # The path leads through /proc/PID/root, a link of the kernel's into the container: only that one is followed.
        target = os.open(root, FOLDER & ~os.O_NOFOLLOW)
        try:
            _apply(source, target, scan(source))
        finally:
            os.close(target)
    finally:
        os.close(source)


def _apply(source: int, target: int, entries: Scan) -> None:
    copies: dict[int, bytes] = {}
    missed: set[bytes] = set()
    ours = [path for path in entries if path not in OUR_MOUNTS]
    for folder, into, path, name in in_folders(source, target, ours, missed):
        found = entries[path]
        if stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
            remove_entry(into, name)
        elif stat.S_ISDIR(found.st_mode):
            _apply_folder(folder, into, name, found)
        elif found.st_nlink > 1 and found.st_ino in copies:
            remove_entry(into, name)
            with parent_of(target, copies[found.st_ino]) as (there, other):
                os.link(other, name, src_dir_fd=there, dst_dir_fd=into, follow_symlinks=False)
        else:
            _apply_other(folder, into, name, found)
            copies[found.st_ino] = path
    if missed:
        raise OSError("the saved layer changed while it was read")
    with Folders(target) as folders:
        for path in reversed(ours):
            if stat.S_ISDIR(entries[path].st_mode):
                copy_metadata(*folders.holding(path), entries[path])
    copy_root_xattrs(source, target)
    copy_root_metadata(target, os.fstat(source))


def _apply_other(folder: int, into: int, name: bytes, found: os.stat_result) -> None:
    try:
        copied = copy_entry(folder, into, name, found)
    except FileExistsError:
        remove_entry(into, name)
        copied = copy_entry(folder, into, name, found)
    if not copied:
        raise OSError("the saved layer changed while it was read")


def _apply_folder(folder: int, into: int, name: bytes, found: os.stat_result) -> None:
    original = os.open(name, FOLDER, dir_fd=folder)
    try:
        opaque = OPAQUE in os.listxattr(original)
    finally:
        os.close(original)
    try:
        there = stat.S_ISDIR(os.stat(name, dir_fd=into, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        there = False
    if not there or opaque:
        remove_entry(into, name)
        copy_entry(folder, into, name, found)
    else:
        copy_xattrs_of(folder, into, name)
