"""Which processes of a container a dump of its process 1 would miss.

CRIU dumps process 1 and its descendants. A process that `docker exec` put into the container descends from Docker's
shim instead: it would be silently lost, so a checkpoint is refused while one lives.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def outsiders(init: int, processes: Iterable[int]) -> list[int]:
    """Those of the processes (host pids) that do not descend from `init`. Processes that have ended do not count."""
    parents = {pid: parent for pid in processes if (parent := _parent(pid)) is not None}
    found = []
    for pid in parents:
        ancestor = pid
        while ancestor in parents and ancestor != init:
            ancestor = parents[ancestor]
        if ancestor != init:
            found.append(pid)
    return found


def described(pid: int) -> str:
    """The process as a person knows it: host pid and command line."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()
    except OSError:
        command = b""
    return f"{pid} {command[:200].decode(errors='replace')}".strip()


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent = stat[stat.rindex(b")") + 2 :].split()[:2]
    return None if state in (b"Z", b"X") else int(parent)
