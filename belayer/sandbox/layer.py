"""A container's writable layer, captured in two looks so that hardly anything is copied while the container is frozen.

`prepare` copies while processes may still write; `settle`, frozen, looks again and redoes what has changed since, so
that the copy is the layer at that instant; `finish`, after the thaw, sets folders' times and computes digests.

What is unchanged since an earlier capture is hard-linked from it. Unchanged means: the same inode with the same ctime.
Nobody can set a ctime, and Linux 6.13 and later give every change that follows a look another one (multigrain time
stamps); older kernels have ticks, so there a ctime younger than a tick is not believed. A write through a shared
mapping moves the ctime only at the page's first fault: inodes so mapped at a look are not believed at the next.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from belayer.sandbox.captured import Captured, Seen, describe, root_of
from belayer.sandbox.mapped import Numbers
from belayer.sandbox.removal import remove_entry
from belayer.sandbox.scan import (
    FOLDER,
    Scan,
    believed_until,
    copy_entry,
    copy_metadata,
    copy_xattrs_of,
    parent_of,
    scan,
)

LAYER_LIMIT_BYTES = 64 << 30


class LayerCapture:
    """One capture of the layer `upper` into the empty folder `target`. OSError when the disk cannot take it."""

    def __init__(
        self,
        upper: Path,
        target: Path,
        known: Captured | None = None,
        saved: Path | None = None,
        merged: Path | None = None,
    ) -> None:
        """`saved` is the folder of the layer that `known` describes; it may be gone. `merged`: see `Numbers`."""
        for folder in (upper, target):
            if not folder.is_absolute() or folder == Path("/"):
                raise OSError(f"{folder} is not a layer's folder")
        self._source = os.open(upper, FOLDER)
        self._target = os.open(target, FOLDER)
        self._saved = -1
        self._known: dict[bytes, Seen] = {}
        if known is not None and saved is not None:
            with suppress(FileNotFoundError):
                self._saved = os.open(saved, FOLDER)
                disbelieved = frozenset(known.disbelieved)
                self._known = {path: seen for path, seen in known.entries.items() if seen.inode not in disbelieved}
        self._first: Scan = {}
        self._last: Scan = {}
        self._root: tuple[int, int] | None = None
        self._believed_ns = 0
        self._reused: set[bytes] = set()
        self._missed: set[bytes] = set()
        self._disbelieved: set[int] = set()
        self._mapped: set[int] = set()
        self._numbers = Numbers(merged)

    def __enter__(self) -> LayerCapture:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self._source, self._target, self._saved):
            if fd >= 0:
                os.close(fd)
        self._numbers.close()

    def prepare(self, mapped: Collection[int] = ()) -> None:
        """Copy all that is there. What moves meanwhile is left to `settle`. `mapped`: see there, as it is now.

        Once is enough: what has been mapped since moves the ctime at its first fault.
        """
        self._mapped.update(mapped)
        if self._believed_ns:
            return
        self._believed_ns = believed_until()
        self._first = scan(self._source)
        size_bytes = sum(found.st_blocks * 512 for found in self._first.values())
        if size_bytes > LAYER_LIMIT_BYTES:
            raise OSError(
                f"the layer holds {size_bytes >> 30} GiB, more than the {LAYER_LIMIT_BYTES >> 30} that are kept"
            )
        if self._mapped:
            self._numbers.look(self._first)
        self._copy(self._first)

    def settle(self, mapped: Collection[int]) -> int:
        """Make the copy exact; how many entries that took. The container is frozen; `mapped` are the inodes that are
        mapped shared, by the numbers that the container sees (`mapped.py`)."""
        self._mapped.update(mapped)
        self._root = root_of(self._source, self._believed_ns)
        self._last = scan(self._source)
        self._disbelieved = self._numbers.among(self._last, self._mapped)
        redo: Scan = {}
        renewed: set[bytes] = set()  # folders that are others than before: nothing in them is taken as it was
        for path, found in self._last.items():
            first = self._first.get(path)
            moved = path.rpartition(b"/")[0] in renewed
            if moved or first is None or not self._is_unchanged(path, first, found):
                redo[path] = found
                if moved or first is None or not _is_same_entry(first, found):
                    renewed.add(path)
        for path in self._first:
            if path not in self._last:
                self._remove(path)
        if redo:
            self._redo(redo, renewed)
        return len(redo)

    def finish(self, checkpoint: str) -> Captured:
        """After the thaw: folders' times, digests, and what the next capture needs to know."""
        self.finish_folders()
        known = {path: self._known[path].digest for path in self._reused if path in self._last}
        young = [found.st_ino for found in self._last.values() if found.st_ctime_ns >= self._believed_ns]
        disbelieved = sorted(self._disbelieved.union(young))
        captured = describe(self._target, self._last, checkpoint, known, disbelieved)
        return msgspec.structs.replace(captured, root=self._root)

    @property
    def entries(self) -> Scan:
        """What was captured."""
        return self._last

    def fresh(self) -> Scan:
        """The files that had to be copied."""
        return {
            path: found
            for path, found in self._last.items()
            if stat.S_ISREG(found.st_mode) and path not in self._reused
        }

    def finish_folders(self) -> None:
        """Folders' owners, modes and times, children first, because adding a child changes its folder's times."""
        for path in reversed(self._last):
            if stat.S_ISDIR(self._last[path].st_mode):
                with parent_of(self._target, path) as (folder, name):
                    copy_metadata(folder, name, self._last[path])
        root = os.fstat(self._source)
        os.fchown(self._target, root.st_uid, root.st_gid)
        os.fchmod(self._target, stat.S_IMODE(root.st_mode))
        os.utime(self._target, ns=(root.st_atime_ns, root.st_mtime_ns))

    # --- steps ---

    def _is_unchanged(self, path: bytes, first: os.stat_result, found: os.stat_result) -> bool:
        return (
            _is_same_entry(first, found)
            and first.st_ctime_ns == found.st_ctime_ns < self._believed_ns
            and path not in self._missed
            and found.st_ino not in self._disbelieved
        )

    def _copy(self, entries: Scan) -> None:
        """Copy the entries, parents first, each from the earlier capture if it is unchanged since."""
        copies: dict[int, bytes] = {}
        for source, target, path, name in in_folders(self._source, self._target, entries, self._missed):
            found = entries[path]
            if not stat.S_ISDIR(found.st_mode):
                other = copies.get(found.st_ino) if found.st_nlink > 1 else None
                if other is not None and _link(self._target, other, target, name):
                    continue
                if self._reuse(path, found, target, name):
                    self._reused.add(path)
                    copies.setdefault(found.st_ino, path)
                    continue
            if copy_entry(source, target, name, found):
                copies.setdefault(found.st_ino, path)
            else:
                self._missed.add(path)

    def _redo(self, redo: Scan, renewed: Collection[bytes]) -> None:
        fresh: Scan = {}
        for path, found in redo.items():
            if stat.S_ISDIR(found.st_mode) and path not in renewed and path not in self._missed:
                with parent_of(self._source, path) as (source, name), parent_of(self._target, path) as (target, _):
                    copy_xattrs_of(source, target, name)
            else:
                fresh[path] = found
        for path in fresh:
            self._remove(path)
        self._reused.difference_update(fresh)
        self._missed.clear()
        self._copy(fresh)
        if self._missed:
            raise OSError("the layer changed while its container was frozen")

    def _remove(self, path: bytes) -> None:
        with suppress(FileNotFoundError, NotADirectoryError), parent_of(self._target, path) as (folder, name):
            remove_entry(folder, name)

    def _reuse(self, path: bytes, found: os.stat_result, target: int, name: bytes) -> bool:
        seen = self._known.get(path)
        if seen is None or (seen.inode, seen.ctime_ns) != (found.st_ino, found.st_ctime_ns):
            return False
        return _link(self._saved, path, target, name)


def in_folders(
    source: int, target: int, paths: Iterable[bytes], missed: set[bytes]
) -> Iterator[tuple[int, int, bytes, bytes]]:
    """Each path with its open folder on both sides; a folder is opened once for a run of its entries.

    Paths whose folder is missing on one side go to `missed` instead.
    """
    here: bytes | None = None
    sides: list[int] = []
    try:
        for path in paths:
            folder, _, name = path.rpartition(b"/")
            if folder != here:
                while sides:
                    os.close(sides.pop())
                here = folder
                with suppress(FileNotFoundError, NotADirectoryError):
                    sides.append(_open(source, folder))
                    sides.append(_open(target, folder))
            if len(sides) == 2:
                yield sides[0], sides[1], path, name
            else:
                missed.add(path)
    finally:
        while sides:
            os.close(sides.pop())


def fill(saved: Path, upper: Path) -> None:
    """Copy a captured layer into the empty upper folder of a container that is not started yet."""
    with LayerCapture(saved, upper) as copy:
        copy.prepare()
        copy.settle(())
        copy.finish_folders()


def _is_same_entry(first: os.stat_result, found: os.stat_result) -> bool:
    """Inode numbers are used again, also for another kind of entry."""
    return first.st_ino == found.st_ino and stat.S_IFMT(first.st_mode) == stat.S_IFMT(found.st_mode)


def _link(root: int, path: bytes, target: int, name: bytes) -> bool:
    """Another name for a copy that is there. False when it is being removed, or has too many names."""
    try:
        with parent_of(root, path) as (folder, other):
            os.link(other, name, src_dir_fd=folder, dst_dir_fd=target, follow_symlinks=False)
    except OSError:
        return False
    return True


def _open(root: int, folder: bytes) -> int:
    if not folder:
        return os.dup(root)
    with parent_of(root, folder) as (parent, name):
        return os.open(name, FOLDER, dir_fd=parent)
