"""What is in a container: files, processes, the witness's memory. Read from outside, through /proc, as root.

The container is not disturbed and need not help. A file that vanishes while it is read is left out, as one that was
gone a moment before; a process that ends meanwhile likewise.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import NamedTuple

from belayer.demo.left_out import is_left_out, masked_path
from belayer.demo.witness import WitnessState

_READ_BYTES = 1 << 20
_SHARED_MEMORY = "/dev/shm"


class FileState(NamedTuple):
    """One file, without its times."""

    kind: str
    """file, directory, link, fifo, socket, character device or block device."""
    mode: int
    owner: int
    group: int
    size_bytes: int
    """Of a regular file; 0 for anything else."""
    content: str
    """A regular file's digest, a link's target, a device's number; else empty."""
    xattrs: tuple[tuple[str, bytes], ...]


class ContainerState(NamedTuple):
    """All that the comparison looks at, beside the journal."""

    files: dict[str, FileState]
    processes: list[str]
    """Command lines below process 1, children after their parent and indented by two blanks a level."""
    witness: WitnessState | None
    """None: the container has none."""


Digests = dict[tuple[str, int, int, int], str]
"""Contents that were read before, by path, inode, ctime in ns and size: most of a container is its image."""


def read_files(pid: int, known: Digests) -> dict[str, FileState]:
    """The container's own files by path, and those in its shared memory; no other mount."""
    mounts = {line.split()[4] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()}
    return read_tree(Path(f"/proc/{pid}/root"), mounts, known)


def read_tree(root: Path, mounts: set[str], known: Digests) -> dict[str, FileState]:
    """The files below `root` by path from there. Temporary names are masked; equal ones are numbered from (2) on."""
    found: dict[str, list[FileState]] = {}
    for start in ("/", _SHARED_MEMORY):
        _walk(root, start, (mounts | {_SHARED_MEMORY}) - {start}, known, found)
    return {
        path if number == 1 else f"{path} ({number})": state
        for path, states in found.items()
        for number, state in enumerate(sorted(states), 1)
    }


def process_tree(pid: int) -> list[str]:
    """The command lines of all descendants; no zombies, since they run nothing and process 1 reaps them."""
    lines: list[tuple[str, list[str]]] = []
    for child in _children(pid):
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            below = process_tree(child)
        except (FileNotFoundError, ProcessLookupError):
            continue
        command = " ".join(word.decode(errors="replace") for word in words if word)
        if command:
            lines.append((command, below))
    return [line for command, below in sorted(lines) for line in (command, *(f"  {inner}" for inner in below))]


def _children(pid: int) -> list[int]:
    try:
        tasks = [task.name for task in Path(f"/proc/{pid}/task").iterdir()]
        return [int(word) for task in tasks for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _walk(root: Path, folder: str, mounts: set[str], known: Digests, found: dict[str, list[FileState]]) -> None:
    try:
        entries = sorted(os.scandir(f"{root}{folder}"), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        path = f"{folder.rstrip('/')}/{entry.name}"
        if path in mounts or is_left_out(path):
            continue
        try:
            state = _state(entry.path, path, known)
        except FileNotFoundError:
            continue
        found.setdefault(masked_path(path), []).append(state)
        if state.kind == "directory":
            _walk(root, path, mounts, known, found)


_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}


def _state(path: str, shown: str, known: Digests) -> FileState:
    status = os.lstat(path)
    kind = _KINDS[stat.S_IFMT(status.st_mode)]
    content, size_bytes = "", 0
    match kind:
        case "file":
            key = (shown, status.st_ino, status.st_ctime_ns, status.st_size)
            if key not in known:
                known[key] = _digest(path)
            content, size_bytes = known[key], status.st_size
        case "link":
            content = str(Path(path).readlink())
        case "character device" | "block device":
            content = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    names = sorted(os.listxattr(path, follow_symlinks=False))
    xattrs = tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in names)
    mode = stat.S_IMODE(status.st_mode)
    return FileState(kind, mode, status.st_uid, status.st_gid, size_bytes, content, xattrs)


def _digest(path: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        while piece := os.read(descriptor, _READ_BYTES):
            digest.update(piece)
    finally:
        os.close(descriptor)
    return digest.hexdigest()
