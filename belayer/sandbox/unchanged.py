"""Whether a container is still what was captured of it: nothing but files, all of them as they were.

Of the layer the inodes alone tell. Equal means: the same names with the same inodes, and every inode, the root's too,
with the ctime that it had. Nobody can set a ctime, and every change of contents, mode, owner, times, xattrs or links
moves it. Where that is not sure the answer is no: when a process had something mapped as it was captured or a ctime was
too young (`Captured`), and on file systems where a write through a mapping may leave no trace.
"""

from __future__ import annotations

from pathlib import Path

from belayer.errors import RestoreFailedError
from belayer.sandbox import given
from belayer.sandbox.captured import Captured, opened, root_of
from belayer.sandbox.manifest import read_edited, read_manifest
from belayer.sandbox.scan import TooDeepError, file_system_of, scan
from belayer.sandbox.sealing import Subject

TRUSTED = frozenset({0xEF53, 0x58465342, 0x9123683E})
"""Magic numbers of ext4, XFS and btrfs, statfs(2). On tmpfs a page that was read first is written without a fault."""
ANY_NS = 1 << 63


class Earlier:
    """The last checkpoint of a container, beside the container. OSError when that cannot be read."""

    def __init__(self, folder: Path, known: Captured, subject: Subject) -> None:
        self._folder = folder
        self._known = known
        self._subject = subject

    def could_hold(self) -> bool:
        """Whether it is there, whole, and nothing but files and a runner with the same traits, before this action."""
        try:
            manifest = read_manifest(self._folder)
        except RestoreFailedError:
            return False
        here = self._subject
        same = (manifest.image_digest, manifest.traits) == (here.container.image_digest, here.traits)
        return manifest.quiet and not manifest.left_out and same and manifest.action < here.action

    def is_unchanged(self) -> bool:
        """Whether the container's files are those that it brings back, with those that Docker binds."""
        container = self._subject.container
        if not is_unchanged(container.upper, self._known):
            return False
        try:
            saved = read_edited(self._folder, read_manifest(self._folder)) or given.Edited({}, b"")
        except RestoreFailedError:
            return False
        return given.read(container.given, container.volumes) == saved.here(self._subject.given)


def is_unchanged(upper: Path, known: Captured) -> bool:
    """Whether the layer, which should not be moving, is the captured one. OSError when it cannot be read."""
    with opened(upper) as root:
        if (
            known.root is None
            or known.root != root_of(root, ANY_NS)
            or known.disbelieved
            or file_system_of(root) not in TRUSTED
        ):
            return False
        try:
            found = scan(root, moving=True)
        except TooDeepError:  # and nothing as deep was captured
            return False
    return found.keys() == known.entries.keys() and all(
        (seen.inode, seen.ctime_ns) == (found[path].st_ino, found[path].st_ctime_ns)
        for path, seen in known.entries.items()
    )
