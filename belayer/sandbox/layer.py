"""A container's writable layer: copied whole, and described by a digest.

A layer's contents are hostile. Nothing in it is opened through a link, its names are bytes (any but NUL and slash), and
special files (overlay's whiteouts are character devices 0:0) are copied as what they are. Both folders are named by
absolute paths that must exist before, so that no slip makes one of them the root.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """What a layer holds."""

    entries: int
    size_bytes: int
    digest: str


def copy(source: Path, target: Path, timeout_s: float) -> None:
    """Copy all of `source` into the existing folder `target`: hard links, holes, xattrs, owners and times kept.

    OSError when it cannot (a full disk, most likely); TimeoutError when it takes too long.
    """
    for folder in (source, target):
        if not folder.is_absolute() or folder == Path("/") or not folder.is_dir() or folder.is_symlink():
            raise OSError(f"{folder} is not a folder to copy from or to")
    command = ["cp", "-a", "--reflink=auto", "--sparse=auto", "--", f"{source}/.", f"{target}/"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"copying the layer took longer than {timeout_s:.0f} s") from None
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip().splitlines()
        raise OSError(f"copying the layer failed: {reason[-1] if reason else done.returncode}")


def summarize(folder: Path) -> LayerSummary:
    """Digest of every entry's name, kind, mode, owner, link target, device, xattrs and contents; times are left out."""
    digest = hashlib.blake2b(digest_size=32)
    entries = 0
    size_bytes = 0
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    pending = [(root, b"")]
    try:
        while pending:
            parent, path = pending.pop()
            try:
                for name in sorted(os.fsencode(entry.name) for entry in os.scandir(parent)):
                    found = os.stat(name, dir_fd=parent, follow_symlinks=False)
                    entries += 1
                    _add(digest, path + b"/" + name, str((found.st_mode, found.st_uid, found.st_gid)).encode())
                    if stat.S_ISDIR(found.st_mode):
                        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                        child = os.open(name, flags, dir_fd=parent)
                        pending.append((child, path + b"/" + name))
                        _add_xattrs(digest, child)
                    elif stat.S_ISREG(found.st_mode):
                        size_bytes += found.st_blocks * 512
                        _add_file(digest, name, parent)
                    elif stat.S_ISLNK(found.st_mode):
                        _add(digest, os.fsencode(os.readlink(name, dir_fd=parent)))
                    else:
                        _add(digest, str(found.st_rdev).encode())
            finally:
                os.close(parent)
    finally:
        for fd, _ in pending:
            os.close(fd)
    return LayerSummary(entries, size_bytes, digest.hexdigest())


def file_digest(path: Path) -> str:
    """BLAKE2b-256 of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _add(digest: hashlib.blake2b, *parts: bytes) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


def _add_xattrs(digest: hashlib.blake2b, fd: int) -> None:
    for name in sorted(os.listxattr(fd)):
        _add(digest, name.encode(errors="surrogateescape"), os.getxattr(fd, name))


def _add_file(digest: hashlib.blake2b, name: bytes, parent: int) -> None:
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    with os.fdopen(fd, "rb", buffering=0) as file:
        _add_xattrs(digest, fd)
        _add(digest, str(os.fstat(fd).st_size).encode())
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
