"""What a process has that its children inherit and CRIU does not keep, read and set from outside, by host pid.

Sources: sched_setattr(2), sched_setaffinity(2), ioprio_set(2), and proc(5) for the files. Numbers of the system calls:
Linux, arch/*/syscalls and include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

CALLS = {"x86_64": (314, 315, 251, 252), "aarch64": (274, 275, 30, 31)}
"""sched_setattr and sched_getattr, ioprio_set and ioprio_get."""
FILES = ("coredump_filter", "timerslack_ns")
SCHED_BYTES = 56
IOPRIO_WHO_PROCESS = 1


def of(pid: int) -> dict[str, str]:
    """The attributes of the process or thread. OSError when it is gone."""
    found = {
        "cpus": ",".join(map(str, sorted(os.sched_getaffinity(pid)))),
        "scheduling": _scheduling(pid),
        "io_priority": str(_call(_number(3), IOPRIO_WHO_PROCESS, pid)),
    }
    for name in FILES:
        found[name] = Path(f"/proc/{pid}/{name}").read_text().strip()
    return found


def enter(namespace: Path, kind: int) -> None:
    """setns(2) for this thread."""
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, kind) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(namespace))
    finally:
        os.close(fd)


def _scheduling(pid: int) -> str:
    """struct sched_attr without its size: policy, flags, nice, priority, deadline's times, clamps."""
    buffer = ctypes.create_string_buffer(SCHED_BYTES)
    _call(_number(1), pid, buffer, SCHED_BYTES, 0)
    return " ".join(map(str, struct.unpack("=IIQiIQQQII", buffer.raw)[1:]))


def _number(which: int) -> int:
    machine = os.uname().machine
    if machine not in CALLS:
        raise OSError(f"the system calls of {machine} are not known to Belayer")
    return CALLS[machine][which]


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(number, *arguments)
    if done < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done
