"""The files that Docker makes for each container and binds into it: /etc/hosts, /etc/hostname and /etc/resolv.conf.

They lie outside the layer, but what a container writes into them is its state. So what Docker wrote is noted when the
container starts, and a checkpoint holds those that are others by then; a restore puts them in place of the new
container's before anything of the old one runs. A file that nobody has touched is the new container's own. Lines of
/etc/hosts that Docker wrote and that are others in the new container (its own address) become the new ones.

The files are the container's to write, hence hostile: only a regular one of at most `LIMIT_BYTES` is read. It is found
by where Docker keeps it, because names in the container may lead elsewhere.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import msgspec

NAMES = ("hosts", "hostname", "resolv.conf")
"""In Docker's folder of the container, and below /etc in the container."""
LIMIT_BYTES = 1 << 20
OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Given(msgspec.Struct, frozen=True):
    """One of the files, with all that a container can change of it."""

    data: bytes
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    xattrs: dict[str, bytes]


Files = dict[str, Given]


class Edited(msgspec.Struct, frozen=True):
    """What a checkpoint holds: the files that are not as Docker wrote them."""

    files: Files
    hosts_before: bytes
    """/etc/hosts as Docker wrote it."""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Edited:
        """msgspec.MsgspecError when it is not one."""
        return msgspec.json.decode(data, type=cls)

    def here(self, given: Files) -> Files:
        """The files as they are in a container to which Docker has given these: all of them."""
        after = given["hosts"].data if "hosts" in given else self.hosts_before
        moved = {
            name: msgspec.structs.replace(file, data=_moved(file.data, self.hosts_before, after))
            if name == "hosts"
            else file
            for name, file in self.files.items()
        }
        return given | moved


def read(folder: Path, mounted: Collection[str] = ()) -> Files:
    """Those in Docker's folder of the container, but for what something else of the host is mounted over. OSError when
    one is not what Docker makes, or too large."""
    found: Files = {}
    for name in NAMES:
        if f"/etc/{name}" not in mounted:
            with suppress(FileNotFoundError):
                found[name] = _read(folder / name)
    return found


def edited(given: Files, now: Files) -> Edited:
    """What is another now than Docker has given."""
    before = given["hosts"].data if "hosts" in given else b""
    return Edited({name: file for name, file in now.items() if given.get(name) != file}, before)


def put(folder: Path, files: Files) -> None:
    """Write them into Docker's files, whose inodes are those that are mounted. OSError when that cannot be."""
    for name, file in files.items():
        with suppress(FileNotFoundError):  # Docker makes none of it here
            _write(folder / name, file)


def _read(path: Path) -> Given:
    fd = _opened(path, os.O_RDONLY)
    try:
        found = os.fstat(fd)
        if found.st_size > LIMIT_BYTES:
            raise OSError(
                f"/etc/{path.name} holds {found.st_size:,} bytes, more than the {LIMIT_BYTES:,} that are kept"
            )
        data = os.pread(fd, LIMIT_BYTES, 0)
        xattrs = {name: os.getxattr(fd, name) for name in os.listxattr(fd)}
    finally:
        os.close(fd)
    return Given(data, stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid, found.st_mtime_ns, xattrs)


def _write(path: Path, file: Given) -> None:
    fd = _opened(path, os.O_WRONLY)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, file.data, 0)
        os.fchown(fd, file.uid, file.gid)
        os.fchmod(fd, file.mode)
        for name, value in file.xattrs.items():
            os.setxattr(fd, name, value)
        os.utime(fd, ns=(file.mtime_ns, file.mtime_ns))
    finally:
        os.close(fd)


def _opened(path: Path, flags: int) -> int:
    fd = os.open(path, flags | OPEN)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a file")
    return fd


def _moved(data: bytes, before: bytes, after: bytes) -> bytes:
    """Lines that Docker wrote and that are others now become those; everything else stays."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    gone = [line for line in old if line not in new]
    come = [line for line in new if line not in old]
    if len(gone) != len(come):
        return data
    instead = dict(zip(gone, come, strict=True))
    return b"".join(instead.get(line, line) for line in data.splitlines(keepends=True))
