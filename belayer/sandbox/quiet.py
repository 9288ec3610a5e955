"""Whether a container is nothing but its files and an idle runner: then a fresh runner over the same files is the same.

What else could be there, and is looked for while it is frozen: other processes; files in /dev/shm and other folders in
memory; message queues and System V objects; anything in /dev that is not as it was; what later actions inherit of
process 1 and somebody has changed from inside. Mounts, addresses and the host name take capabilities that the container
does not have.

What a child inherits, by fork(2), execve(2), clone(2), credentials(7), sched(7), ioprio_set(2) and proc(5), and another
process can set: limits, scheduling (policy, nice value, clamps, CPUs), I/O priority, the OOM score, the core dump's
filter, the timer slack. Process 1 alone could set the rest (ids, masks, seccomp, speculation); what proc(5) says of it
is compared too.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from belayer.sandbox import attributes, text
from belayer.sandbox.captured import opened
from belayer.sandbox.folders import FOLDER, parent_of
from belayer.sandbox.scan import file_system_of

IN_MEMORY = ("shm", "mqueue")
STATUS_FIELDS = (
    "Umask:",
    "Uid:",
    "Gid:",
    "Groups:",
    "SigBlk:",
    "SigIgn:",
    "CapInh:",
    "CapPrm:",
    "CapEff:",
    "CapBnd:",
    "CapAmb:",
    "NoNewPrivs:",
    "Seccomp:",
    "Seccomp_filters:",
    "THP_enabled:",
    "Speculation_Store_Bypass:",
    "SpeculationIndirectBranch:",
)
CGROUPS = "/sys/fs/cgroup"
TMPFS = 0x01021994
CLONE_NEWIPC = 0x08000000
IPC_OBJECTS = "System V objects"


def noise(pid: int, processes: list[int], traits_before: str, tmpfs: tuple[str, ...] = ()) -> str:
    """What else there is in the frozen container; empty when nothing is."""
    others = [process for process in processes if process != pid]
    return f"process {others[0]}" if others else next(noises(pid, traits_before, tmpfs), "")


def noises(pid: int, traits_before: str, tmpfs: tuple[str, ...] = ()) -> Iterator[str]:
    """What else there is besides processes."""
    for folder in IN_MEMORY:
        for entry in os.scandir(f"/proc/{pid}/root/dev/{folder}"):
            yield text.shown(f"/dev/{folder}/{entry.name}")
    for folder in tmpfs:
        if _is_filled(pid, folder):
            yield folder
    if has_ipc_objects(pid):
        yield IPC_OBJECTS
    if difference := _difference(traits_before, traits(pid, tmpfs)):
        yield difference


def traits(pid: int, tmpfs: tuple[str, ...] = ()) -> str:
    """One line for each thing of process 1 and its container, besides files, that later actions would meet."""
    return "\n".join([*_inherited(pid), *_devices(pid, tmpfs)])


def attributes_in(traits: str) -> dict[str, str]:
    """The attributes of process 1 that are among its traits."""
    lines = (line.partition(" ") for line in traits.splitlines())
    return {name: value for name, _, value in lines if name in attributes.ALL}


def _difference(before: str, now: str) -> str:
    """The first line that is another; empty when there is none."""
    if before == now:
        return ""
    changed = sorted(set(before.splitlines()) ^ set(now.splitlines())) or ["the order of what it has"]
    return text.shown(f"changed: {changed[0][:100]}")


def _inherited(pid: int) -> Iterator[str]:
    process = Path(f"/proc/{pid}")
    yield from (line for line in text.lines_of(process / "status") if line.startswith(STATUS_FIELDS))
    yield from (process / "limits").read_text().splitlines()
    yield from (f"{name} {value}" for name, value in attributes.of(pid, attributes.ALL).items())


def _devices(pid: int, tmpfs: tuple[str, ...]) -> Iterator[str]:
    """/dev and its entries, and the folders in memory: kind, mode, owner, device, link's target, xattrs. No contents:
    only a device or a link is as it was. Mount points cannot be replaced, so these paths lead where they did. Where
    cgroups are of version 1 the folder that holds their mounts is in memory, and can be written."""
    root = f"/proc/{pid}/root"
    held = [folder for folder in ("/dev", CGROUPS) if folder == "/dev" or _is_in_memory(root + folder)]
    names = [f"{folder}/{name}" for folder in held for name in sorted(os.listdir(root + folder))]  # noqa: PTH208
    for path in (*held, *names, "/dev/pts/ptmx", *sorted(tmpfs)):
        found = os.lstat(root + path)
        target = os.readlink(root + path) if stat.S_ISLNK(found.st_mode) else ""  # noqa: PTH115, a Path is slow
        line = f"{path} {found.st_mode:o} {found.st_uid}:{found.st_gid} {found.st_rdev:x} {target}"
        for name in sorted(os.listxattr(root + path, follow_symlinks=False)):
            line += f" {name}={os.getxattr(root + path, name, follow_symlinks=False).hex()}"
        yield line


def has_ipc_objects(pid: int) -> bool:
    """Whether there are System V objects in the process's namespace: they outlive the processes that made them.

    /proc/sysvipc shows the namespace of whoever opens it, so this thread goes there for a moment; a thread of its own
    would have to wait for a processor while the container is frozen. OSError when it cannot.
    """
    own = os.open("/proc/thread-self/ns/ipc", os.O_RDONLY | os.O_CLOEXEC)
    there = os.open(f"/proc/{pid}/ns/ipc", os.O_RDONLY | os.O_CLOEXEC)
    try:
        attributes.enter(there, CLONE_NEWIPC)
        try:
            return any(Path(f"/proc/sysvipc/{kind}").read_bytes().count(b"\n") > 1 for kind in ("shm", "sem", "msg"))
        finally:
            attributes.enter(own, CLONE_NEWIPC)
    finally:
        os.close(own)
        os.close(there)


def _is_in_memory(folder: str) -> bool:
    with opened(Path(folder)) as fd:
        return file_system_of(fd) == TMPFS


def _is_filled(pid: int, folder: str) -> bool:
    """Whether there is anything in a folder of the container, no link followed on the way."""
    root = os.open(f"/proc/{pid}/root", FOLDER & ~os.O_NOFOLLOW)
    try:
        with parent_of(root, os.fsencode(folder.strip("/"))) as (parent, name):
            here = os.open(name, FOLDER, dir_fd=parent)
            try:
                with os.scandir(here) as entries:
                    return any(entries)
            finally:
                os.close(here)
    except OSError:  # a link on its way: then processes are dumped
        return True
    finally:
        os.close(root)
