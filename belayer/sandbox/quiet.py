"""Whether a container is nothing but its files and an idle runner: then a fresh runner over the same files is the same.

What else could be there, and is looked for: other processes; files in /dev/shm and other folders in memory, message
queues, something new in /dev; System V objects (the runner counts those, before the freeze); limits, priorities and
masks of process 1 that somebody has changed from inside, which later actions inherit. Mounts, addresses and the host
name take capabilities that the container does not have.
"""

from __future__ import annotations

import os
from pathlib import Path

from belayer.sandbox.scan import FOLDER, parent_of
from belayer.sandbox.text import lines_of, shown

DEVICES = frozenset(
    "console core fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero".split()  # noqa: SIM905
)
STATUS_FIELDS = ("Umask:", "Uid:", "Gid:", "Groups:", "SigIgn:", "CapEff:", "CapBnd:", "NoNewPrivs:", "Seccomp:")


def noise(pid: int, processes: list[int], traits_before: str, tmpfs: tuple[str, ...] = ()) -> str:
    """What else there is in the frozen container; empty when nothing is."""
    others = [process for process in processes if process != pid]
    if others:
        return f"process {others[0]}"
    root = Path(f"/proc/{pid}/root/dev")
    strange = {entry.name for entry in os.scandir(root)} - DEVICES
    if strange:
        return shown(f"/dev/{min(strange)}")
    for folder in ("shm", "mqueue"):
        for entry in os.scandir(root / folder):
            return shown(f"/dev/{folder}/{entry.name}")
    for folder in tmpfs:
        if _is_filled(pid, folder):
            return folder
    return "" if traits(pid) == traits_before else "process 1's limits or masks"


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


def traits(pid: int) -> str:
    """What actions inherit of process 1 besides its folder and environment."""
    process = Path(f"/proc/{pid}")
    status = [line for line in lines_of(process / "status") if line.startswith(STATUS_FIELDS)]
    priority = shown((process / "stat").read_bytes()).rpartition(") ")[2].split()
    parts = [(process / "limits").read_text(), (process / "oom_score_adj").read_text(), *status, priority[15]]
    parts.extend((priority[16], priority[38]))
    return "\n".join(parts)
