"""What was captured of a layer: an inode, a ctime and a digest of every entry, and one digest of all.

Two layers have the same digest exactly when they hold the same names, kinds, modes, owners, link targets, devices,
xattrs and contents; times are left out.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from belayer.sandbox.folders import FOLDER, Folders, open_file
from belayer.sandbox.limits import PIECE_BYTES, Step, unbounded
from belayer.sandbox.scan import Scan, believed_until, scan

BLOCK_BYTES = 1 << 18
BLOCKS_A_STEP = PIECE_BYTES // BLOCK_BYTES
ZEROS = bytes(BLOCK_BYTES)


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """One entry of the layer as it was captured."""

    inode: int
    ctime_ns: int
    digest: str
    """BLAKE2b-128: of a file's or folder's contents and xattrs, of a link's target, of a device's number."""


class Captured(msgspec.Struct, frozen=True, array_like=True):
    """A captured layer, and what the next capture of the same container may reuse of it."""

    checkpoint: str
    entries: dict[bytes, Seen]
    disbelieved: list[int]
    """Inodes that a process could still change without a trace."""
    size_bytes: int
    digest: str
    root: tuple[int, int] | None = None
    """Inode and ctime of the layer's own folder; None when the ctime was too young to be believed."""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Captured:
        """msgspec.MsgspecError when it is not one."""
        return msgspec.msgpack.decode(data, type=cls)


def describe(
    root: int,
    entries: Scan,
    checkpoint: str,
    known: Mapping[bytes, str],
    disbelieved: list[int] | None = None,
    step: Step = unbounded,
) -> Captured:
    """Digests of what lies in a captured layer, open as `root`. Those that are known are not computed again.

    `step` is asked before each entry and each piece of a file's data.
    """
    whole = hashlib.blake2b(digest_size=32)
    size_bytes = 0
    seen = {}
    with Folders(root) as folders:
        for path in sorted(entries):
            found = entries[path]
            digest = known.get(path)
            if digest is None:
                step(0)
                digest = _digest(*folders.holding(path), found.st_mode, step)
            seen[path] = Seen(found.st_ino, found.st_ctime_ns, digest)
            if stat.S_ISREG(found.st_mode):
                size_bytes += found.st_blocks * 512
            for part in (path, f"{found.st_mode} {found.st_uid} {found.st_gid} {digest}".encode()):
                whole.update(len(part).to_bytes(8, "little") + part)
    return Captured(checkpoint, seen, disbelieved or [], size_bytes, whole.hexdigest())


def digest_of(folder: Path) -> str:
    """The digest of a captured layer, every byte read."""
    with opened(folder) as root:
        return describe(root, scan(root), "", {}).digest


def rebase(upper: Path, captured: Captured) -> Captured:
    """What was captured, as seen from another container whose layer has just been filled with it."""
    believed_ns = believed_until()
    with opened(upper) as root:
        at = root_of(root, believed_ns)
        now = scan(root)
    entries = {
        path: Seen(now[path].st_ino, now[path].st_ctime_ns, seen.digest)
        for path, seen in captured.entries.items()
        if path in now
    }
    young = sorted({seen.inode for seen in entries.values() if seen.ctime_ns >= believed_ns})
    return Captured(captured.checkpoint, entries, young, captured.size_bytes, captured.digest, at)


def root_of(root: int, believed_ns: int) -> tuple[int, int] | None:
    """What `Captured.root` says of the folder open as `root`."""
    found = os.fstat(root)
    return (found.st_ino, found.st_ctime_ns) if found.st_ctime_ns < believed_ns else None


def file_digest(path: Path, step: Step = unbounded) -> str:
    """BLAKE2b-256 of a file's contents. `step` is asked before each piece."""
    digest = hashlib.blake2b(digest_size=32)
    piece = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size_bytes := file.readinto(piece):
            step(size_bytes)
            digest.update(piece[:size_bytes])
    return digest.hexdigest()


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """The folder's descriptor."""
    fd = os.open(folder, FOLDER)
    try:
        yield fd
    finally:
        os.close(fd)


def _add_data(digest: hashlib.blake2b, fd: int, step: Step) -> None:
    """A file's size and its blocks that are not all zero: a hole counts as what is read there, but costs nothing."""
    size = os.fstat(fd).st_size
    digest.update(size.to_bytes(8, "little"))
    at = blocks = 0
    while at < size:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            return
        at -= at % BLOCK_BYTES
        blocks += 1
        if blocks % BLOCKS_A_STEP == 0:
            step(PIECE_BYTES)
        block = os.pread(fd, BLOCK_BYTES, at)
        if block != ZEROS[: len(block)]:
            digest.update(at.to_bytes(8, "little") + block)
        at += BLOCK_BYTES


def _digest(folder: int, name: bytes, mode: int, step: Step) -> str:
    digest = hashlib.blake2b(digest_size=16)
    if stat.S_ISLNK(mode):
        digest.update(os.fsencode(os.readlink(name, dir_fd=folder)))
    elif stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        fd = open_file(folder, name) if stat.S_ISREG(mode) else os.open(name, FOLDER, dir_fd=folder)
        try:
            for attribute in sorted(os.listxattr(fd)):
                value = os.getxattr(fd, attribute)
                digest.update(os.fsencode(attribute) + f"={len(value)}:".encode() + value)
            if stat.S_ISREG(mode):
                digest.update(b"\0")
                _add_data(digest, fd, step)
        finally:
            os.close(fd)
    else:
        digest.update(str(os.stat(name, dir_fd=folder, follow_symlinks=False).st_rdev).encode())
    return digest.hexdigest()
