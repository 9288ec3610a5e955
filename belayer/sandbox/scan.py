"""What lies in a layer, as its inodes say, and how one entry is copied out of it. No link is ever followed.

A layer's contents are hostile and, before the freeze, moving: all is opened as `folders.py` says, and a file must be
the one that was looked at, or the entry is left out (a second look, frozen, finds it).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import time
from contextlib import suppress

from belayer.sandbox.folders import FOLDER, MOVED, NAMED, Folders, open_file, unless_moved
from belayer.sandbox.limits import PIECE_BYTES, Step, unbounded

PATH_LIMIT_BYTES = 4095
"""Below the layer's root: PATH_MAX, beyond which no program can name a file in one piece."""
CHUNK_BYTES = 1 << 20
SEEN_EVERY = 1000
TICK_NS = 20_000_000
OVERLAY = "trusted.overlay."
ELSEWHERE = frozenset(("redirect", "metacopy"))
OVERLAY_FS = 0x794C7630
FICLONE = 0x40049409
"""ioctl_ficlone(2): share the data of a whole file."""

Scan = dict[bytes, os.stat_result]
"""Path below the layer's root -> its inode's fields, parents before children."""


class TooDeepError(OSError):
    """A path is longer than PATH_LIMIT_BYTES."""

    def __init__(self, path: bytes) -> None:
        beginning = path[:60].decode(errors="backslashreplace")
        super().__init__(
            errno.ENAMETOOLONG,
            f"a path is {len(path):,} bytes long, more than the {PATH_LIMIT_BYTES:,} that are kept: /{beginning}...",
        )


def scan(root: int, seen: Step = unbounded, moving: bool = False) -> Scan:
    """Everything below the folder open as `root`, the entries of a folder one after another. OSError when it cannot be
    read, TooDeepError when it is too deep. `moving`: what is gone or another than a moment ago is left out.
    `seen` is told now and then how many entries there are so far."""
    found: Scan = {}
    pending = [b""]
    with Folders(root) as folders:
        while pending:
            path = pending.pop()
            try:
                _scan_folder(folders.at(path), path and path + b"/", found, pending, seen)
            except OSError as error:
                if not moving or error.errno not in MOVED:
                    raise
    return found


def _scan_folder(folder: int, prefix: bytes, found: Scan, pending: list[bytes], seen: Step) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            path = prefix + os.fsencode(entry.name)
            if len(path) > PATH_LIMIT_BYTES:
                raise TooDeepError(path)
            try:
                found[path] = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if len(found) % SEEN_EVERY == 0:
                seen(len(found))
            if stat.S_ISDIR(found[path].st_mode):
                pending.append(path)


def believed_until() -> int:
    """A ctime from here on may stand for several changes. Linux 6.13: Documentation/filesystems/multigrain-ts.rst."""
    major, minor = os.uname().release.split(".")[:2]
    exact = (int(major), int(minor.partition("-")[0])) >= (6, 13)
    return (1 << 63) if exact else time.time_ns() - TICK_NS


def copy_entry(source: int, target: int, name: bytes, found: os.stat_result, step: Step = unbounded) -> bool:
    """Copy one entry, without a folder's children, between two folders. False: it is not what was found any more.

    `step` is asked before each piece of a file's data. OSError when the target cannot take it.
    """
    with unless_moved():
        if stat.S_ISREG(found.st_mode):
            return _copy_file(source, target, name, found, step)
        if stat.S_ISDIR(found.st_mode):
            folder = os.open(name, FOLDER, dir_fd=source)
            try:
                os.mkdir(name, 0o700, dir_fd=target)
                copy = os.open(name, FOLDER, dir_fd=target)
                try:
                    _copy_xattrs(folder, copy)
                finally:
                    os.close(copy)
            finally:
                os.close(folder)
            return True
        if stat.S_ISLNK(found.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        else:
            os.mknod(name, found.st_mode, found.st_rdev, dir_fd=target)
            _copy_xattrs_by_name(source, target, name)
        copy_metadata(target, name, found)
        return True
    return False


def copy_metadata(target: int, name: bytes, found: os.stat_result) -> None:
    """Owner, mode and times. The mode last but for the times: a change of owner clears setuid."""
    os.chown(name, found.st_uid, found.st_gid, dir_fd=target, follow_symlinks=False)
    if not stat.S_ISLNK(found.st_mode):
        os.chmod(name, stat.S_IMODE(found.st_mode), dir_fd=target)
    os.utime(name, ns=(found.st_atime_ns, found.st_mtime_ns), dir_fd=target, follow_symlinks=False)


def copy_xattrs_of(source: int, target: int, name: bytes) -> None:
    """Make a folder's extended attributes those of its original."""
    original = os.open(name, FOLDER, dir_fd=source)
    try:
        copy = os.open(name, FOLDER, dir_fd=target)
        try:
            _copy_xattrs(original, copy)
        finally:
            os.close(copy)
    finally:
        os.close(original)


def copy_root_xattrs(root: int, copy: int) -> None:
    """The same for the folders that layers themselves are. What overlay notes there is each mount's own."""
    _set_xattrs(root, copy, [name for name in os.listxattr(root) if not name.startswith(OVERLAY)])


def copy_root_metadata(copy: int, found: os.stat_result) -> None:
    """Owner, mode and times for the folder that a layer itself is, open as `copy`."""
    os.fchown(copy, found.st_uid, found.st_gid)
    os.fchmod(copy, stat.S_IMODE(found.st_mode))
    os.utime(copy, ns=(found.st_atime_ns, found.st_mtime_ns))


def _copy_file(source: int, target: int, name: bytes, found: os.stat_result, step: Step) -> bool:
    original = open_file(source, name)
    try:
        now = os.fstat(original)
        if (now.st_dev, now.st_ino) != (found.st_dev, found.st_ino):
            return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        copy = os.open(name, flags, 0o600, dir_fd=target)
        try:
            _copy_data(original, copy, now.st_size, step)
            os.fchown(copy, found.st_uid, found.st_gid)
            os.fchmod(copy, stat.S_IMODE(found.st_mode))
            _copy_xattrs(original, copy)
            os.utime(copy, ns=(found.st_atime_ns, found.st_mtime_ns))
        finally:
            os.close(copy)
    finally:
        os.close(original)
    return True


def _copy_data(original: int, copy: int, size: int, step: Step) -> None:
    """Shared where the disk can, else extent by extent, so that holes stay holes."""
    if size == 0:
        return
    with suppress(OSError):
        fcntl.ioctl(copy, FICLONE, original)
        return
    os.ftruncate(copy, size)
    at = 0
    while at < size:
        try:
            start = os.lseek(original, at, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            return
        at = os.lseek(original, start, os.SEEK_HOLE)
        while start < at:
            size_bytes = min(at - start, PIECE_BYTES)
            step(size_bytes)
            done = _copy_range(original, copy, start, size_bytes)
            if done == 0:
                return
            start += done


def _copy_range(original: int, copy: int, start: int, size: int) -> int:
    """How many bytes were copied; 0 at the end of the file. Not every pair of file systems has copy_file_range(2)."""
    try:
        return os.copy_file_range(original, copy, size, start, start)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    return os.pwrite(copy, os.pread(original, min(size, CHUNK_BYTES), start), start)


def can_share(folder: int) -> bool:
    """Whether a copy within the folder's file system shares its data: then it takes neither time nor room."""
    try:
        one = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            other = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=folder)
            try:
                fcntl.ioctl(other, FICLONE, one)
            finally:
                os.close(other)
        finally:
            os.close(one)
    except OSError:
        return False
    return True


def file_system_of(fd: int) -> int:
    """The magic number of the file system: the first word that fstatfs(2) gives."""
    buffer = (ctypes.c_long * 32)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fstatfs(fd, buffer) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return buffer[0]


def _copy_xattrs(original: int, copy: int) -> None:
    """Overlay's own attributes mean something in a layer. An overlay mount refuses them, or from Linux 6.7 on would
    show them in the container: Documentation/filesystems/overlayfs.rst, 'Nesting overlayfs mounts'. OSError when what
    they mean is not in the entry itself: a folder's old name, a file's contents below."""
    _set_xattrs(original, copy, _meant_for(copy, os.listxattr(original)))


def _copy_xattrs_by_name(source: int, target: int, name: bytes) -> None:
    """The same for entries that are not to be opened."""
    original = os.open(name, NAMED, dir_fd=source)
    try:
        copy = os.open(name, NAMED, dir_fd=target)
        try:
            path = f"/proc/self/fd/{original}"
            _set_xattrs(path, f"/proc/self/fd/{copy}", _meant_for(copy, os.listxattr(path)))
        finally:
            os.close(copy)
    finally:
        os.close(original)


def _meant_for(copy: int, names: list[str]) -> list[str]:
    own = {name.removeprefix(OVERLAY) for name in names if name.startswith(OVERLAY)}
    if not own or file_system_of(copy) != OVERLAY_FS:
        return names
    if elsewhere := own & ELSEWHERE:
        raise OSError(errno.EOPNOTSUPP, f"only an empty layer can take its {elsewhere.pop()}")
    return [name for name in names if not name.startswith(OVERLAY)]


def _set_xattrs(original: int | str, copy: int | str, names: list[str]) -> None:
    """What the copy has besides, it has from its folder: a default access control list."""
    for old in os.listxattr(copy):
        if old not in names and not old.startswith(OVERLAY):
            os.removexattr(copy, old)
    for name in names:
        os.setxattr(copy, name, os.getxattr(original, name))
