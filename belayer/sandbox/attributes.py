"""What a process has that its children inherit and CRIU does not keep, read and set from outside, by host pid.

Sources: sched_setattr(2), sched_setaffinity(2), ioprio_set(2), and proc(5) for the files. Numbers of the system calls:
Linux, arch/*/syscalls and include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from belayer.sandbox import text

CALLS = {"x86_64": (314, 315, 251, 252), "aarch64": (274, 275, 30, 31)}
"""sched_setattr and sched_getattr, ioprio_set and ioprio_get."""
OF_THREADS = ("cpus", "io_priority")
FILES = ("coredump_filter", "timerslack_ns", "oom_score_adj")
NEVER_USUAL = "oom_score_adj"
"""CRIU writes only one that is not 0, and what it starts from is the restorer's own: containerd's shims have 1."""
ALL = (*OF_THREADS, "scheduling", *FILES)
SCHED_BYTES = 56
IOPRIO_WHO_PROCESS = 1


def of(pid: int, names: Iterable[str]) -> dict[str, str]:
    """These attributes of the process or thread. OSError when it is gone."""
    return {name: _one(pid, name) for name in names}


def _one(pid: int, name: str) -> str:
    if name == "cpus":
        return ",".join(map(str, sorted(os.sched_getaffinity(pid))))
    if name == "scheduling":
        return _scheduling(pid)
    if name == "io_priority":
        return str(_call(_number(3), IOPRIO_WHO_PROCESS, pid))
    try:
        return Path(f"/proc/{pid}/{name}").read_text().strip()
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ESRCH):  # a zombie
            return ""
        raise


def unusual(pids: Iterable[int], usual: Mapping[str, str]) -> dict[int, dict[str, str]]:
    """What the processes' threads have that is not as usual, by the thread ids that the container sees.

    The processes (host pids) must not move meanwhile. What all threads of a process share is under the first one's id.
    """
    found: dict[int, dict[str, str]] = {}
    for thread, names in _threads(pids):
        own = {
            name: value for name, value in of(thread, names).items() if name == NEVER_USUAL or usual.get(name) != value
        }
        if own:
            found[_inside(thread)] = own
    return found


def give(pids: Iterable[int], own: Mapping[int, Mapping[str, str]]) -> None:
    """Give to the threads of processes that CRIU has made again what `unusual` said of them. OSError when it cannot.

    Of processors that this machine or container lacks the others are taken; if there is none, all of them.
    """
    if not own:
        return
    for thread, _ in _threads(pids):
        for name, value in own.get(_inside(thread), {}).items():
            if name == "cpus":
                there = os.sched_getaffinity(thread)
                os.sched_setaffinity(thread, {int(cpu) for cpu in value.split(",")} & there or there)
            elif name == "io_priority":
                _call(_number(2), IOPRIO_WHO_PROCESS, thread, int(value))
            elif _one(thread, name) != value:
                written = f"0x{value}" if name == "coredump_filter" else value
                Path(f"/proc/{thread}/{name}").write_text(written)


def _threads(pids: Iterable[int]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Each thread, and which attributes are its own. Processes that have ended are left out."""
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208, a Path is slow
                yield int(task), (*OF_THREADS, *FILES) if int(task) == pid else OF_THREADS


def _inside(thread: int) -> int:
    """The id by which the container knows the thread."""
    return int(text.status_of(thread)["NSpid"].split()[-1])


def enter(namespace: int, kind: int) -> None:
    """setns(2) for this thread, into the namespace open as `namespace`."""
    if _libc().setns(namespace, kind) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _scheduling(pid: int) -> str:
    """struct sched_attr without its size: policy, flags, nice, priority, deadline's times, clamps."""
    buffer = ctypes.create_string_buffer(SCHED_BYTES)
    _call(_number(1), pid, buffer, SCHED_BYTES, 0)
    return " ".join(map(str, struct.unpack("=IIQiIQQQII", buffer.raw)[1:]))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _number(which: int) -> int:
    machine = os.uname().machine
    if machine not in CALLS:
        raise OSError(f"the system calls of {machine} are not known to Belayer")
    return CALLS[machine][which]


def _call(number: int, *arguments: object) -> int:
    done = _libc().syscall(number, *arguments)
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done
