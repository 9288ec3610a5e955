"""Where the files are that processes watch with inotify. The kernel tells a watched inode and not its name; CRIU
restores a watch by name, and would look for it, everything frozen, in a few folders only.

So it is looked for here, before the freeze: first in the folders where watched files usually are, then in the whole of
the container's root, for at most `SEARCH_S`. What has no name any more, or is not found in time, cannot be captured.
Names that change meanwhile fail the dump. Source: proc_pid_fdinfo(5).
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
import termios
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from belayer.sandbox.descriptors import copies
from belayer.sandbox.mounts import mounted
from belayer.sandbox.text import lines_of

SEARCH_S = 3.0
INOTIFY = "anon_inode:inotify"
OPENED_BY_HANDLE = ("tmpfs", "ext4", "xfs", "btrfs")
"""File systems in which CRIU finds a file without its name: those in memory, and of the host's folders."""
_WATCH = re.compile(r"^inotify wd:\S+ ino:([0-9a-f]+) sdev:([0-9a-f]+) ")
Inode = tuple[int, int]
"""Device, as stat(2) has it, and number."""


class NotFoundError(Exception):
    """A watched file has no name that CRIU could find. Internal: a checkpoint is refused."""

    def __init__(self, pid: int, cause: str) -> None:
        super().__init__(cause)
        self.pid = pid


def places(init: int, processes: Iterable[int], folders: Iterable[str]) -> list[str]:
    """The container's names for what its processes watch. NotFoundError names the process (host pid) and the file."""
    watched = {inode: pid for pid in processes for inode in _watches(pid)}
    if not watched:
        return []
    root = Path(f"/proc/{init}/root")
    device = root.stat().st_dev
    kinds = {_device(mount.device): mount.kind for mount in mounted(str(init))}
    wanted: set[Inode] = set()
    for inode, pid in watched.items():
        if inode[0] == device:
            wanted.add(inode)
        elif (kind := kinds.get(inode[0], "an unknown file system")) not in OPENED_BY_HANDLE:
            raise NotFoundError(pid, f"it watches a file of {kind} with inotify")
    found: dict[Inode, str] = {}
    deadline = time.monotonic() + SEARCH_S
    for folder in (*folders, "/"):
        if found.keys() == wanted:
            break
        for inode, path in _names(root, folder, device, deadline):
            if inode in wanted:
                found[inode] = path
                if found.keys() == wanted:
                    break
    for inode in wanted - found.keys():
        raise NotFoundError(watched[inode], f"it watches inode {inode[1]} with inotify, whose name was not found")
    return sorted(map(_encodable, found.values()))


def has_unread(processes: Iterable[int]) -> bool:
    """Whether one of the processes has not read yet what inotify has told it: CRIU does not keep that."""
    return any(_unread_bytes(copy) for pid in processes for copy in copies(pid, lambda target: target == INOTIFY))


def _unread_bytes(descriptor: int) -> int:
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)


def _watches(pid: int) -> Iterator[Inode]:
    process = Path(f"/proc/{pid}")
    with suppress(FileNotFoundError, ProcessLookupError):
        for link in (process / "fd").iterdir():
            if str(link.readlink()) != "anon_inode:inotify":
                continue
            for line in lines_of(process / "fdinfo" / link.name):
                if (said := _WATCH.match(line)) is not None:
                    device = int(said[2], 16)
                    yield os.makedev(device >> 20, device & 0xFFFFF), int(said[1], 16)


def _names(root: Path, folder: str, device: int, deadline: float) -> Iterator[tuple[Inode, str]]:
    """What lies in a folder and below, the folder too, and on that device; no link is followed."""
    waiting = [folder]
    while waiting and time.monotonic() < deadline:
        here = waiting.pop()
        with suppress(OSError):  # gone meanwhile, or too deep
            inside = os.path.join(root, here.lstrip("/"))  # noqa: PTH118
            yield (device, os.lstat(inside).st_ino), here
            with os.scandir(inside) as entries:
                for entry in entries:
                    seen = entry.stat(follow_symlinks=False)
                    if seen.st_dev != device:
                        continue
                    path = f"{here.rstrip('/')}/{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(path)
                    else:
                        yield (device, seen.st_ino), path


def _device(numbers: str) -> int:
    major, minor = numbers.split(":")
    return os.makedev(int(major), int(minor))


def _encodable(path: str) -> str:
    """The path, or the folder above it whose name can be told to CRIU, which will look in it."""
    while not path.isprintable():
        path = os.path.dirname(path)  # noqa: PTH120
    return path
