"""The mounts of a container that are not part of its images, because whoever restores it provides them again.

These are binds from the host (Docker's /etc/hosts and the like, our control folder), the cgroup hierarchies and the
files that Docker masks with /dev/null. Source: runc 1.1, libcontainer/container_linux.go, Checkpoint; mounts are read
from mountinfo, proc(5), instead of the bundle.
"""

from __future__ import annotations

from pathlib import Path


def external_mounts(pid: int) -> dict[str, str]:
    """Their mount points, as the container's process 1 sees them, and the names that runc's restore gives them."""
    mounts = {}
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, where = (_plain(field) for field in before.split(" ")[3:5])
        kind = after.split(" ", 1)[0]
        if where == "/":
            continue
        masked = root == "/null"
        bind = root != "/" and kind not in ("proc", "sysfs", "tmpfs")
        if masked or bind or kind in ("cgroup", "cgroup2"):
            mounts[where] = "/dev/null" if masked else where
    return mounts


def _plain(field: str) -> str:
    """Undo mountinfo's octal escapes."""
    return field.encode().decode("unicode_escape").encode("latin-1").decode(errors="surrogateescape")
