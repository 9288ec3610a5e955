"""Processes that end with the one that spawned them as soon as its main thread is gone, not once its memory is freed.

The kernel says so to its pidfd once the thread that dies last has torn the memory down, and to its children
(PR_SET_PDEATHSIG) once the thread that spawned them has ended, which may be that one: 0.4 s for an engine's HTTP
process on a busy machine. But a robust futex rings before that. So the main thread holds a bell (`bell.py`), and each
child waits for it. Where the bell cannot be had the pidfd alone is watched.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

from belayer.gpu.bell import Bell
from belayer.processes import exit_with_owner, start_ticks

_held: list[mmap.mmap] = []
"""What must stay mapped: a bell in it is in its thread's list, or a thread waits for it."""


def offer() -> str:
    """Arm a bell in the calling thread, the main one; what children need to wait for it, for the environment."""
    fd = os.memfd_create("belayer-parent", os.MFD_CLOEXEC)
    os.ftruncate(fd, mmap.PAGESIZE)
    _bell(fd).arm()
    return f"{os.getpid()} {start_ticks(os.getpid())} {fd}"


def end_with(offered: str) -> None:
    """From now on, end this process when the one that made the offer does, or its main thread has."""
    pid, ticks, number = map(int, offered.split())
    exit_with_owner(pid, ticks)
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return  # it is dead by now, or its descriptors are not ours to open
    bell = _bell(fd)
    os.close(fd)
    threading.Thread(target=lambda: (bell.wait(), os._exit(0)), name="parent-bell", daemon=True).start()


def _bell(fd: int) -> Bell:
    _held.append(mmap.mmap(fd, mmap.PAGESIZE))
    return Bell(ctypes.addressof(ctypes.c_char.from_buffer(_held[-1])))
