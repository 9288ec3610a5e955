"""Which processes of a container a dump of its process 1 would miss.

CRIU dumps process 1 and its descendants. A process that `docker exec` put into the container descends from Docker's
shim instead: it would be silently lost, so a checkpoint is refused while one lives.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from belayer.sandbox import text


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
    return f"{pid} {text.shown(command[:200])}".strip()


def is_dying(pid: int) -> bool:
    """Whether a process that is held (frozen or traced) has been killed all the same.

    SIGKILL waits for one that is frozen (cgroup v1), and one that was traced stays a zombie until its tracer looks.
    """
    fields = status_of(pid)
    if not fields:
        return True
    pending = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
    return fields["State"][0] in "ZX" or bool(pending >> (signal.SIGKILL - 1) & 1)


def why_it_would_hang(held: Iterable[int]) -> str | None:
    """Why CRIU would wait for ever for these processes that are held; None when it would not."""
    for pid in held:
        if is_dying(pid):
            return f"process {described(pid)} was killed meanwhile"
    return None


def kill_traced(processes: Collection[int]) -> None:
    """SIGKILL processes that a CRIU holds, and then that CRIU: it would wait for ever for process 1, which cannot end
    before its dead children are let go of, and those are CRIU's."""
    tracers = _crius_at_work_on(processes)
    for pid in (*processes, *tracers):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_tracers(processes: Iterable[int]) -> None:
    """SIGKILL every CRIU that traces one of the processes."""
    for tracer in _crius_at_work_on(processes):
        with suppress(ProcessLookupError):
            os.kill(tracer, signal.SIGKILL)


def kill_users_of(folder: Path) -> None:
    """SIGKILL every process that names the folder on its command line, and all its descendants."""
    named = os.fsencode(folder)
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and int(process.name) != os.getpid():
                arguments = (process / "cmdline").read_bytes().split(b"\0")
                if any(argument.startswith(named) for argument in arguments):
                    _kill_with_descendants(int(process.name))


def _crius_at_work_on(processes: Iterable[int]) -> list[int]:
    found: list[int] = []
    for tracer in {int(fields["TracerPid"]) for pid in processes if (fields := status_of(pid))} - {0}:
        with suppress(OSError):
            if b"criu" in Path(f"/proc/{tracer}/cmdline").read_bytes():
                found.append(tracer)
    return found


def _kill_with_descendants(pid: int) -> None:
    children: list[str] = []
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children.extend((thread / "children").read_text().split())
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for child in children:
        _kill_with_descendants(int(child))


def status_of(pid: int) -> dict[str, str]:
    """/proc/PID/status; empty when the process is gone."""
    try:
        return text.status_of(pid)
    except (FileNotFoundError, ProcessLookupError):
        return {}


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent = stat[stat.rindex(b")") + 2 :].split()[:2]
    return None if state in (b"Z", b"X") else int(parent)
