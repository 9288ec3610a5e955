"""The mounts of a container that are not part of its images, because whoever restores it provides them again.

- Binds from the host (Docker's /etc/hosts and the like, our control folder) and files that Docker masks with /dev/null:
  runc's restore provides them under the names that its own checkpoint gives them. Source: runc 1.1,
  libcontainer/container_linux.go, Checkpoint and addMaskPaths.
- cgroup hierarchies: runc would provide those of whoever calls it, hence of the daemon, and the container would see the
  host's; we name them ourselves and say at the restore where the new container's own are.
- Folders that Docker masks with an empty read-only tmpfs: an empty folder of the host does as well.

Mounts are read from mountinfo, proc(5).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CONTAINER = "{container}"
"""Stands for the container's id in a path that is told at the restore."""
MASKED = ("/proc/", "/sys/firmware", "/sys/devices/")


@dataclass(frozen=True, slots=True)
class External:
    """Mount points in the container and their names in the images; what runc does not know how to provide."""

    names: dict[str, str]
    sources: dict[str, str]
    """Name -> path on the host, with CONTAINER in it. An empty path: an empty folder of its own."""


def external_mounts(pid: int, container_id: str) -> External:
    """As the container's process 1 sees them."""
    ours = {device: where for device, root, where, kind in _mounts("self") if root == "/" and "cgroup" in kind}
    names: dict[str, str] = {}
    sources: dict[str, str] = {}
    for device, root, where, kind in _mounts(str(pid)):
        if where == "/":
            continue
        if kind in ("cgroup", "cgroup2") and device in ours and container_id in root:
            names[where] = "belayer" + where.replace("/", "-")
            sources[names[where]] = ours[device] + root.replace(container_id, CONTAINER)
        elif root == "/null":
            names[where] = "/dev/null"
        elif where.startswith(MASKED) and kind not in ("proc", "sysfs"):
            names[where] = "belayer" + where.replace("/", "-")  # a tmpfs, or what took its place in an earlier restore
            sources[names[where]] = ""
        elif kind in ("cgroup", "cgroup2") or (root != "/" and kind not in ("proc", "sysfs", "tmpfs")):
            names[where] = where
    return External(names, sources)


def criu_settings(sources: dict[str, str], container_id: str, empty: Path) -> str:
    """CRIU's configuration file that provides the mounts to the container that is being restored.

    Empty folders are made below `empty`, one each: CRIU loses the read-only flag of mounts that share a folder.
    """
    settings = ""
    for name, source in sources.items():
        path = source.replace(CONTAINER, container_id)
        if not source:
            (empty / name).mkdir(parents=True)
            path = str(empty / name)
        settings += f"external mnt[{name}]:{path}\n"
    return settings


def _mounts(process: str) -> list[tuple[str, str, str, str]]:
    """Device, root in its file system, mount point and kind of each."""
    found = []
    for line in Path(f"/proc/{process}/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        root, where = (_plain(field) for field in fields[3:5])
        found.append((fields[2], root, where, after.split(" ", 1)[0]))
    return found


def _plain(field: str) -> str:
    """Undo mountinfo's octal escapes."""
    return field.encode().decode("unicode_escape").encode("latin-1").decode(errors="surrogateescape")
