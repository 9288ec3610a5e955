"""Which files of the layer the processes could write without a trace: those that they have mapped shared.

A write through a mapping moves the file's ctime only at the page's first fault. Whether the mapping is writable now
says nothing, because mprotect(2) gives a dirty page its old rights back without a fault; so every shared one counts.

A mapping does not tell the inode in the layer. overlayfs shows a file that was copied up from the image under the
number that it had there, and /proc/PID/maps says, by kernel version, that number, the layer's own, or the one from
before the copying (of files with several names). Asked by stat(2), through /proc/PID/map_files here and by name there,
overlayfs answers the same for the same file; so that is compared. What else maps says is added, which costs at most a
copy. Source: Linux, fs/overlayfs/inode.c (ovl_getattr, ovl_get_inode), fs/proc/task_mmu.c.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from belayer.sandbox.folders import FOLDER, Folders
from belayer.sandbox.scan import Scan

UNKNOWN = 0


def mapped_inodes(processes: Iterable[int], devices: Collection[int] | None = None) -> set[int]:
    """Numbers, as the container sees them, of the inodes that the processes have mapped shared.

    `devices`: only of files whose st_dev is among these. A process that is gone is left out.
    """
    return {inode for pid in processes for inode in _mapped_by(pid, devices)}


def _mapped_by(pid: int, devices: Collection[int] | None) -> Iterator[int]:
    task, maps = _maps(pid)
    for line in maps.splitlines():
        fields = line.split(None, 5)
        if fields[1][3:4] != b"s" or fields[4] == b"0":
            continue
        try:
            found = Path(f"/proc/{task}/map_files/{fields[0].decode()}").stat()
        except OSError:
            yield int(fields[4])
            continue
        if devices is None or found.st_dev in devices:
            yield from (found.st_ino, int(fields[4]))


def _maps(pid: int) -> tuple[int, bytes]:
    """A thread that has the process's memory, and its maps: the first thread may have ended before the others."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_bytes()
        if maps:
            return pid, maps
        for task in Path(f"/proc/{pid}/task").iterdir():
            maps = Path(f"/proc/{task.name}/maps").read_bytes()
            if maps:
                return int(task.name), maps
    except (FileNotFoundError, ProcessLookupError):
        pass
    return pid, b""


class Numbers:
    """The numbers under which the container sees the layer's files."""

    def __init__(self, merged: Path | None) -> None:
        """`merged`: where the container's files are mounted; None: they are seen as they lie in the layer."""
        self._merged = None if merged is None else os.open(merged, FOLDER)
        self._known: dict[bytes, tuple[int, int, int]] = {}

    def close(self) -> None:
        if self._merged is not None:
            os.close(self._merged)

    def look(self, entries: Scan) -> None:
        """Ask for those of all files in the layer. The container may still move; then it is asked again later."""
        if self._merged is None:
            return
        with Folders(self._merged) as folders:
            for path, found in entries.items():
                if stat.S_ISREG(found.st_mode) and not self._cached(path, found):
                    self._known[path] = (found.st_ino, found.st_ctime_ns, _ask(folders, path))

    def among(self, entries: Scan, mapped: Collection[int]) -> set[int]:
        """The layer's own inode numbers of the files that the container sees under one of the numbers `mapped`. With
        them those of which that cannot be told."""
        if not mapped:
            return set()
        self.look(entries)
        suspect = {*mapped, UNKNOWN}
        return {
            found.st_ino
            for path, found in entries.items()
            if stat.S_ISREG(found.st_mode) and (found.st_ino in mapped or self._cached(path, found) in suspect)
        }

    def _cached(self, path: bytes, found: os.stat_result) -> int | None:
        """None without a container."""
        known = self._known.get(path)
        return known[2] if known is not None and known[:2] == (found.st_ino, found.st_ctime_ns) else None


def _ask(folders: Folders, path: bytes) -> int:
    try:
        folder, name = folders.holding(path)
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino
    except OSError:  # it has moved
        return UNKNOWN
