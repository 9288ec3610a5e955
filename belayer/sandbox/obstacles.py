"""What CRIU cannot dump, or would bring back wrongly, looked for before anything is frozen and again while it is.

Each was tried with CRIU 4.2 on Linux 6.18; `docs/sandbox.md` lists what works.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from belayer.sandbox.criu import GHOST_LIMIT_BYTES
from belayer.sandbox.sockets import bound_here
from belayer.sandbox.text import rows_of, shown, status_of

DUMPABLE = frozenset(("[eventfd]", "[eventpoll]", "[signalfd]", "[timerfd]", "[pidfd]", "inotify"))
"""Kinds of anonymous inodes that come back as they were."""
CAP_SYS_RESOURCE = 24
DELETED = b" (deleted)"
STOPPED = "do_signal_stop"
"""Where in the kernel a stopped process waits: in a freezer of version 1 its state no longer says so."""
SECRET = b"/secretmem"
IN_MEMORY = (b"/memfd:", b"/SYSV", b"/dev/zero")
"""Names of memory that looks like a deleted file and comes back in another way."""
_TICKS = re.compile(r"^ticks: (\d+)$", re.M)
_INTERVAL = re.compile(r"^it_interval: \((\d+), (\d+)\)$", re.M)


def obstacle(init: int, processes: Sequence[int]) -> tuple[int, str] | None:
    """The first process (host pid) that cannot be captured, and why."""
    try:
        if any(Path(f"/proc/{init}/root/dev/mqueue").iterdir()):
            return init, "it has POSIX message queues, whose contents CRIU does not dump"
        namespace = Path(f"/proc/{init}/ns/user").readlink()
    except OSError:
        return None
    if (found := bound_here(init, processes)) is not None:
        return found
    limits_readable = _has_capability(CAP_SYS_RESOURCE)
    for pid in processes:
        try:
            cause = _cause(pid, namespace, limits_readable)
        except (FileNotFoundError, ProcessLookupError):
            continue
        if cause:
            return pid, cause
    return None


def _cause(pid: int, namespace: Path, limits_readable: bool) -> str:
    process = Path(f"/proc/{pid}")
    status = status_of(pid)
    if int(status["TracerPid"]):
        return "another process traces it (a debugger, strace)"
    if status["State"][0] == "T" or (process / "wchan").read_text() == STOPPED:
        return "it is stopped (SIGSTOP, a terminal's Ctrl-Z), and CRIU would wait for it; let it go on or end it"
    if status["State"][0] == "Z" and int(status["Threads"]) > 1:
        return "its first thread has ended and others go on, which CRIU cannot bring back"
    if not limits_readable and set(status["Uid"].split()) != {"0"}:
        return "it is not root's, and this machine lacks CAP_SYS_RESOURCE, so that CRIU cannot read its limits"
    if (process / "ns/user").readlink() != namespace:
        return "it has a user namespace of its own"
    with suppress(FileNotFoundError):  # a zombie
        if shown((process / "exe").readlink()).startswith("/memfd:"):
            return "it runs a program from memory (memfd_create), which CRIU dumps and cannot bring back"
    for fd in (process / "fd").iterdir():
        kind = shown(fd.readlink())
        if kind.startswith("pipe:") and _number(process / "fdinfo" / fd.name, "flags", 8) & os.O_DIRECT:
            return "it has a pipe of packets (O_DIRECT), which CRIU cannot dump"
        if kind.endswith(" (deleted)") and not kind.startswith("/memfd:") and (cause := _too_large(fd, kind)):
            return cause
        if not kind.startswith("anon_inode:"):
            continue
        kind = kind.removeprefix("anon_inode:")
        if kind not in DUMPABLE:
            return f"it has {kind} open, which CRIU cannot dump"
        if kind == "[eventfd]" and _number(process / "fdinfo" / fd.name, "eventfd-semaphore"):
            return "it has an eventfd that is a semaphore; restored, it would be a counter"
        if kind == "[timerfd]" and _has_ticked(process / "fdinfo" / fd.name):
            return "a periodic timerfd of it has ticked and not been read; restored, it would never fire again"
    return _mapped_cause(process)


def _mapped_cause(process: Path) -> str:
    """Of what it has mapped, which it may have closed since."""
    for row in rows_of(process / "maps"):
        bounds, *rest = row.split(None, 5)
        name = rest[4] if len(rest) > 4 else b""
        if name.startswith(b"anon_inode:"):
            return f"it has {shown(name[11:])} mapped, which CRIU cannot dump"
        if name == SECRET + DELETED:
            return "it has secret memory (memfd_secret), which only it can read"
        if name.endswith(DELETED) and not name.startswith(IN_MEMORY):
            start, end = (int(part, 16) for part in bounds.split(b"-"))
            if cause := _too_large(process / f"map_files/{start:x}-{end:x}", shown(name)):
                return cause
    return ""


def _too_large(link: Path, name: str) -> str:
    """Of a deleted file, which goes into the images."""
    with suppress(FileNotFoundError):
        found = link.stat()
        size_bytes = found.st_blocks * 512
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 0 and size_bytes > GHOST_LIMIT_BYTES:
            return f"its file {name} takes {size_bytes:,} bytes; at most {GHOST_LIMIT_BYTES:,} are captured of one"
    return ""


def _number(fdinfo: Path, name: str, base: int = 10) -> int:
    """A field of it; 0 when it has none."""
    found = re.search(rf"^{name}:\s*(\d+)$", fdinfo.read_text(), re.M)
    return int(found[1], base) if found else 0


def _has_ticked(fdinfo: Path) -> bool:
    text = fdinfo.read_text()
    ticks, interval = _TICKS.search(text), _INTERVAL.search(text)
    return ticks is not None and int(ticks[1]) > 0 and interval is not None and (interval[1], interval[2]) != ("0", "0")


def _has_capability(number: int) -> bool:
    return bool(int(status_of("self")["CapEff"], 16) >> number & 1)
