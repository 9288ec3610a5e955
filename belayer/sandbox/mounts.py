"""The mounts of a container that are not part of its images, because whoever restores it provides them again.

- Binds from the host (Docker's /etc/hosts and the like, our control folder) and files that Docker masks with /dev/null:
  runc's restore provides them under the names that its own checkpoint gives them. Source: runc 1.1,
  libcontainer/container_linux.go, Checkpoint and addMaskPaths.
- cgroup hierarchies: runc would provide those of whoever calls it, hence of the daemon, and the container would see the
  host's; we name them ourselves and say at the restore where the new container's own are. Where: as the host has them
  mounted, and not where another CRIU at work has mounted them for itself for a moment.
- Folders that Docker masks with an empty read-only tmpfs: an empty folder of the host does as well.

Mounts are read from mountinfo, proc(5).
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from belayer.errors import HostUnfitError
from belayer.sandbox.text import rows_of, shown

CONTAINER = "{container}"
"""Stands for the container's id in a path that is told at the restore."""
MASKED = ("/proc/", "/sys/firmware", "/sys/devices/")
MNT_DETACH = 2
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
BOUNDED_INODES = 4096
CRIUS_OWN = "/.criu."
"""In the names of the mounts that every CRIU makes for itself and takes away again, in the host's namespace."""


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo."""

    device: str
    root: str
    """The mounted folder within its file system."""
    where: str
    kind: str
    options: str

    @property
    def is_cgroup(self) -> bool:
        return self.kind in ("cgroup", "cgroup2")


@dataclass(frozen=True, slots=True)
class External:
    """Mount points in the container and their names in the images; what runc does not know how to provide."""

    names: dict[str, str]
    sources: dict[str, str]
    """Name -> path on the host, with CONTAINER in it. An empty path: an empty folder of its own."""


def external_mounts(pid: int, container_id: str, volumes: Collection[str] = ()) -> External:
    """As the container's process 1 sees them. `volumes`: mount points of what is the host's, as Docker knows them."""
    ours = {mount.device: mount.where for mount in reversed(mounted("self")) if mount.root == "/" and mount.is_cgroup}
    names: dict[str, str] = {}
    sources: dict[str, str] = {}
    theirs = mounted(str(pid))
    own = {mount.device for mount in theirs if mount.root == "/"}
    # A bind of a part of any other file system comes from the host.
    for mount in theirs:
        where = shown(mount.where)  # a name that is not UTF-8 is then none that CRIU finds, and it says so
        if where == "/":
            continue
        if mount.is_cgroup and mount.device in ours and container_id in mount.root:
            names[where] = "belayer" + where.replace("/", "-")
            sources[names[where]] = ours[mount.device] + mount.root.replace(container_id, CONTAINER)
        elif where in volumes:
            names[where] = where
        elif mount.root == "/null":
            names[where] = "/dev/null"
        elif where.startswith(MASKED) and mount.kind not in ("proc", "sysfs"):
            names[where] = "belayer" + where.replace("/", "-")  # a tmpfs, or what took its place in an earlier restore
            sources[names[where]] = ""
        elif mount.is_cgroup or (mount.root != "/" and mount.device not in own):
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


def mounted(process: str) -> list[Mount]:
    """All that the process ("self", or a host pid) sees, in the order in which they were mounted, but CRIU's own."""
    return [mount for mount in _mountinfo(process) if CRIUS_OWN not in mount.where]


def mount_bounded(folder: Path, size_bytes: int) -> None:
    """Make the folder, in memory and of limited size: what a container writes there fills no disk. HostUnfitError."""
    folder.mkdir(mode=0o700)
    options = f"mode=0700,size={size_bytes},nr_inodes={BOUNDED_INODES}"
    libc = ctypes.CDLL(None, use_errno=True)
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    if libc.mount(b"belayer", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(flags), options.encode()) != 0:
        found = f"no tmpfs at {folder}: {os.strerror(ctypes.get_errno())}"
        raise HostUnfitError("mounts", found, "run Belayer with CAP_SYS_ADMIN, where dockerd sees what it mounts")


def unmount_leftovers(container_id: str, run_folder: Path) -> None:
    """Unmount what is in the container's folder, and what a CRIU or runc that failed or was killed in a restore of it
    has left mounted on the host.

    CRIU's are in the folder too; runc's is the container's root, in runc's folder of the container. Must come before
    the folders are removed: one of them is the host's cgroups.
    """
    root = f"/{container_id}/criu-root"
    run_folder = run_folder.resolve()
    libc = ctypes.CDLL(None, use_errno=True)
    for mount in reversed(_mountinfo("self")):
        where = Path(mount.where)
        if run_folder in where.parents or (container_id and mount.where.endswith(root)):
            libc.umount2(os.fsencode(where), MNT_DETACH)
            if mount.where.endswith(root):
                with suppress(OSError):  # not empty: then it is somebody's
                    where.rmdir()
                    where.parent.rmdir()


def _mountinfo(process: str) -> list[Mount]:
    found = []
    for line in rows_of(Path(f"/proc/{process}/mountinfo")):
        before, _, after = line.partition(b" - ")
        fields = before.split(b" ")
        root, where = (_plain(field) for field in fields[3:5])
        kind, _, options = after.split(b" ", 2)
        found.append(Mount(shown(fields[2]), root, where, shown(kind), shown(options)))
    return found


def _plain(field: bytes) -> str:
    """A path as Python has it, mountinfo's octal escapes undone."""
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), field))
