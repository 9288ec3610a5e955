"""What actor processes are called in events: `actors/HOST-PID-SUFFIX`. It tells who it was, and whether he lives."""

from __future__ import annotations

import os

from belayer import ids
from belayer.processes import start_ticks


def new_name(host: str) -> str:
    """The name of the actors of this process. The suffix tells processes with one pid apart."""
    return f"actors/{host}-{os.getpid()}-{ids.new_suffix()}"


def pid_of(name: str) -> int:
    """The process id in a name; 0 when it is not an actor's."""
    words = name.rsplit("-", 2)
    return int(words[1]) if name.startswith("actors/") and len(words) == 3 and words[1].isdecimal() else 0


def local_pid(name: str, host: str) -> int:
    """The process id in a name of an actor on this host; 0 when it is not one."""
    pid = pid_of(name)
    return pid if pid and name.startswith(f"actors/{host}-{pid}-") else 0


def is_surely_dead(name: str, host: str) -> bool:
    """Whether the process is known to be gone: it was on this host, and no process has its id."""
    pid = local_pid(name, host)
    return bool(pid) and not start_ticks(pid)
