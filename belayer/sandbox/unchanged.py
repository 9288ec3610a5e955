"""Whether a container's files are still those that were captured of it, told by the inodes alone.

Equal means: the same names with the same inodes, and every inode, the root's too, with the ctime that it had. Nobody
can set a ctime, and every change of contents, mode, owner, times, xattrs or links moves it. Where that is not sure the
answer is no: when a process had something mapped as it was captured or a ctime was too young (`Captured`), and on file
systems where a write through a mapping may leave no trace.
"""

from __future__ import annotations

from pathlib import Path

from belayer.sandbox.captured import Captured, opened, root_of
from belayer.sandbox.scan import TooDeepError, file_system_of, scan

TRUSTED = frozenset({0xEF53, 0x58465342, 0x9123683E})
"""Magic numbers of ext4, XFS and btrfs, statfs(2). On tmpfs a page that was read first is written without a fault."""
ANY_NS = 1 << 63


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
