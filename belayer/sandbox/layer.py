"""A container's writable layer, captured in two looks so that hardly anything is copied while the container is frozen.

`prepare` copies while processes may still write, again if much changes meanwhile; `settle`, frozen, looks again and
redoes what has changed since, so that the copy is the layer at that instant; `finish`, after the thaw, sets folders'
times and computes digests.

What is unchanged since an earlier capture is hard-linked from it. Unchanged means: the same inode with the same ctime.
Nobody can set a ctime, and Linux 6.13 and later give every change that follows a look another one (multigrain time
stamps); older kernels have ticks, so there a ctime younger than a tick is not believed. A write through a shared
mapping moves the ctime only at the page's first fault: inodes so mapped at a look are not believed at the next.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from belayer.sandbox.captured import Captured, Seen, describe, root_of
from belayer.sandbox.folders import FOLDER, MOVED, Folders, parent_of, unless_moved
from belayer.sandbox.limits import PIECE_BYTES, Bounds, sized, unbounded
from belayer.sandbox.mapped import Numbers
from belayer.sandbox.removal import remove_entry
from belayer.sandbox.scan import (
    Scan,
    TooDeepError,
    believed_until,
    can_share,
    copy_entry,
    copy_metadata,
    copy_root_metadata,
    copy_root_xattrs,
    copy_xattrs_of,
    scan,
)

Mapped = Callable[[], Collection[int]]
"""The inodes that are mapped shared now, by the numbers that the container sees (`mapped.py`)."""


class LayerCapture:
    """One capture of the layer `upper` into the empty folder `target`.

    OSError when the disk cannot take it, CheckpointRefusedError and CheckpointFailedError of its bounds, if it has any.
    """

    def __init__(
        self,
        upper: Path,
        target: Path,
        known: Captured | None = None,
        saved: Path | None = None,
        merged: Path | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        """`saved` is the folder of the layer that `known` describes; it may be gone. `merged`: see `Numbers`."""
        self._bounds = bounds
        self._go_on = unbounded if bounds is None else bounds.go_on
        self._copied_bytes = 0
        self._prepared = False
        for folder in (upper, target):
            if not folder.is_absolute() or folder == Path("/"):
                raise OSError(f"{folder} is not a layer's folder")
        self._source = os.open(upper, FOLDER)
        self._target = os.open(target, FOLDER)
        self._fds = [self._source, self._target]
        self._saved: Folders | None = None
        self._known: dict[bytes, Seen] = {}
        if known is not None and saved is not None:
            with suppress(FileNotFoundError):
                self._fds.append(os.open(saved, FOLDER))
                self._saved = Folders(self._fds[-1])
                disbelieved = frozenset(known.disbelieved)
                self._known = {path: seen for path, seen in known.entries.items() if seen.inode not in disbelieved}
        self._first: Scan = {}
        self._last: Scan = {}
        self._root: tuple[int, int] | None = None
        self._root_found = os.fstat(self._source)
        self._believed_ns = 0
        self._reused: set[bytes] = set()
        self._missed: set[bytes] = set()
        self._disbelieved: set[int] = set()
        self._mapped: set[int] = set()
        self._numbers = Numbers(merged)

    def __enter__(self) -> LayerCapture:
        return self

    def __exit__(self, *_: object) -> None:
        if self._saved is not None:
            self._saved.close()
        for fd in self._fds:
            os.close(fd)
        self._numbers.close()

    def look(self) -> int:
        """The first look: how many bytes `prepare` will copy."""
        if self._prepared:
            return 0
        self._believed_ns = believed_until()
        self._first = self._look(moving=True)
        self._check(0, _size(self._first))
        size_bytes = _size(self._first, self._is_known)
        return 0 if size_bytes > PIECE_BYTES and can_share(self._target) else size_bytes

    def prepare(self, mapped: Mapped = frozenset) -> None:
        """Copy all that is there, once. What moves meanwhile is left to `settle`, if it is little. `mapped` tells what
        is mapped now; it is asked after each look, because what is mapped later moves the ctime at its first fault."""
        if not self._believed_ns:
            self.look()
        self._mapped.update(mapped())
        if self._mapped:
            self._numbers.look(self._first)
        if not self._prepared:
            self._copy(self._first)
            self._prepared = True
        if self._bounds is not None and _size(self._first) > self._bounds.limits.frozen_bytes:
            self._catch_up(self._bounds, mapped)

    def settle(self, mapped: Collection[int]) -> int:
        """Make the copy exact; how many entries that took. The container is frozen; `mapped` are the inodes that are
        mapped shared, by the numbers that the container sees (`mapped.py`)."""
        self._mapped.update(mapped)
        self._root = root_of(self._source, self._believed_ns)
        self._root_found = os.fstat(self._source)
        copy_root_xattrs(self._source, self._target)
        self._last = self._look()
        changes = self._changes(self._last)
        if self._bounds is not None and (behind := self._behind(self._bounds, changes)):
            self._refuse(self._bounds, changes, behind)
        self._redo(changes)
        if self._missed:
            raise OSError("the layer changed while its container was frozen")
        return len(changes.redo)

    def finish(self, checkpoint: str) -> Captured:
        """After the thaw: folders' times, digests, and what the next capture needs to know."""
        self.finish_folders()
        known = {path: self._known[path].digest for path in self._reused if path in self._last}
        young = [found.st_ino for found in self._last.values() if found.st_ctime_ns >= self._believed_ns]
        disbelieved = sorted(self._disbelieved.union(young))
        captured = describe(self._target, self._last, checkpoint, known, disbelieved, self._go_on)
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
        with Folders(self._target) as folders:
            for path in reversed(self._last):
                if stat.S_ISDIR(self._last[path].st_mode):
                    copy_metadata(*folders.holding(path), self._last[path])
        copy_root_metadata(self._target, self._root_found)

    # --- steps ---

    def _look(self, moving: bool = False) -> Scan:
        if self._bounds is None:
            return scan(self._source, moving=moving)
        try:
            found = scan(self._source, lambda entries: self._check(entries, 0), moving)
        except TooDeepError as error:
            self._bounds.refuse(str(error))
        self._check(len(found), 0)
        return found

    def _check(self, entries: int, size_bytes: int) -> None:
        self._go_on()
        if self._bounds is not None:
            self._bounds.check_layer(entries, size_bytes)

    def _count(self, size_bytes: int) -> None:
        """A Step: files that grow while they are copied count as well."""
        self._copied_bytes += size_bytes
        self._check(0, self._copied_bytes)

    def _catch_up(self, bounds: Bounds, mapped: Mapped) -> None:
        """Copy what has changed since, until what is left may be copied frozen. Refused when it does not get less: when
        more than half of what was copied has changed meanwhile."""
        before_bytes = self._copied_bytes
        while True:
            believed_ns = believed_until()
            now = self._look(moving=True)
            self._check(0, _size(now))
            self._mapped.update(mapped())
            changes = self._changes(now)
            behind_bytes = self._behind(bounds, changes)
            if not behind_bytes:
                return
            if behind_bytes > before_bytes // 2:
                self._refuse(bounds, changes, behind_bytes)
            self._redo(changes)
            self._first, self._believed_ns, before_bytes = now, believed_ns, behind_bytes

    def _changes(self, now: Scan) -> Changes:
        """Between the last look and this one."""
        self._disbelieved = self._numbers.among(now, self._mapped)
        redo: Scan = {}
        renewed: set[bytes] = set()
        for path, found in now.items():
            first = self._first.get(path)
            moved = path.rpartition(b"/")[0] in renewed
            if moved or first is None or not self._is_unchanged(path, first, found):
                redo[path] = found
                if moved or first is None or path in self._missed or not _is_same_entry(first, found):
                    renewed.add(path)
        return Changes(redo, renewed, [path for path in self._first if path not in now])

    def _behind(self, bounds: Bounds, changes: Changes) -> int:
        """How many bytes there are to copy again, if they are more than may be copied frozen; else 0."""
        size_bytes = _size(changes.redo)
        too_much = size_bytes > bounds.limits.frozen_bytes and not can_share(self._target)
        return size_bytes if too_much else 0

    def _refuse(self, bounds: Bounds, changes: Changes, behind_bytes: int) -> NoReturn:
        path = max(changes.redo, key=lambda path: _size({path: changes.redo[path]}))
        first = self._first.get(path)
        grown = 0 if first is None else changes.redo[path].st_size - first.st_size
        what = "came anew" if first is None else f"grew by {grown:,} bytes" if grown > 0 else "changed"
        name = path.decode(errors="backslashreplace")
        bounds.refuse(
            f"/{name} {what} while it was copied; {sized(behind_bytes)} would be copied while the container stands, "
            f"the limit is {sized(bounds.limits.frozen_bytes)}"
        )

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
        self._copied_bytes = 0
        for source, target, path, name in in_folders(self._source, self._target, entries, self._missed):
            self._go_on()
            found = entries[path]
            if not stat.S_ISDIR(found.st_mode):
                other = copies.get(found.st_ino) if found.st_nlink > 1 else None
                if other is not None and self._link_copy(other, target, name):
                    continue
                if self._reuse(path, found, target, name):
                    self._reused.add(path)
                    copies.setdefault(found.st_ino, path)
                    continue
            if copy_entry(source, target, name, found, self._count):
                copies.setdefault(found.st_ino, path)
            else:
                self._missed.add(path)

    def _redo(self, changes: Changes) -> None:
        """Make the copy follow. What could not be had is in `missed`."""
        for path in changes.gone:
            self._remove(path)
        fresh: Scan = {}
        gone: set[bytes] = set()
        with Folders(self._source) as originals, Folders(self._target) as copies:
            for path, found in changes.redo.items():
                if stat.S_ISDIR(found.st_mode) and path not in changes.renewed:
                    try:
                        copy_xattrs_of(originals.holding(path)[0], *copies.holding(path))
                    except OSError as error:
                        if error.errno not in MOVED:
                            raise
                        gone.add(path)
                else:
                    fresh[path] = found
        for path in fresh:
            self._remove(path)
        self._reused.difference_update(fresh)
        self._missed = gone
        self._copy(fresh)

    def _remove(self, path: bytes) -> None:
        with unless_moved(), parent_of(self._target, path) as (folder, name):
            remove_entry(folder, name)

    def _link_copy(self, other: bytes, target: int, name: bytes) -> bool:
        with suppress(OSError), parent_of(self._target, other) as (folder, other_name):
            return _link(folder, other_name, target, name)
        return False

    def _reuse(self, path: bytes, found: os.stat_result, target: int, name: bytes) -> bool:
        if self._saved is not None and self._is_known(path, found):
            with suppress(OSError):  # it is being removed
                return _link(*self._saved.holding(path), target, name)
        return False

    def _is_known(self, path: bytes, found: os.stat_result) -> bool:
        seen = self._known.get(path)
        return seen is not None and (seen.inode, seen.ctime_ns) == (found.st_ino, found.st_ctime_ns)


class Changes(NamedTuple):
    """Of a layer between two looks."""

    redo: Scan
    """What is new or not what it was."""
    renewed: set[bytes]
    """Folders that are others than before: nothing in them is taken as it was."""
    gone: list[bytes]


def in_folders(
    source: int, target: int, paths: Iterable[bytes], missed: set[bytes]
) -> Iterator[tuple[int, int, bytes, bytes]]:
    """Each path with its open folder on both sides; a folder is opened once for a run of its entries.

    Paths whose folder is missing on one side go to `missed` instead.
    """
    here: bytes | None = None
    sides: tuple[int, int] | None = None
    with Folders(source) as originals, Folders(target) as copies:
        for path in paths:
            folder, _, name = path.rpartition(b"/")
            if folder != here:
                here, sides = folder, None
                with unless_moved():
                    sides = originals.at(folder), copies.at(folder)
            if sides is None:
                missed.add(path)
            else:
                yield *sides, path, name


def fill(saved: Path, upper: Path) -> None:
    """Copy a captured layer into the empty upper folder of a container that is not started yet."""
    with LayerCapture(saved, upper) as copy:
        copy.prepare()
        copy.settle(())
        copy.finish_folders()


def _size(entries: Scan, apart_from: Callable[[bytes, os.stat_result], bool] = lambda _path, _found: False) -> int:
    """Bytes on the disk of the files among the entries, hard links counted once."""
    return sum(
        {
            found.st_ino: found.st_blocks * 512
            for path, found in entries.items()
            if stat.S_ISREG(found.st_mode) and not apart_from(path, found)
        }.values()
    )


def _is_same_entry(first: os.stat_result, found: os.stat_result) -> bool:
    """Inode numbers are used again, also for another kind of entry."""
    return first.st_ino == found.st_ino and stat.S_IFMT(first.st_mode) == stat.S_IFMT(found.st_mode)


def _link(folder: int, other: bytes, target: int, name: bytes) -> bool:
    """Another name for a copy that is there. False when it is being removed, or has too many names."""
    try:
        os.link(other, name, src_dir_fd=folder, dst_dir_fd=target, follow_symlinks=False)
    except OSError:
        return False
    return True
