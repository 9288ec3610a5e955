"""Copies of other processes' descriptors, for what no file of /proc tells. Source: pidfd_getfd(2)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

PIDFD_GETFD = 438


def copies(pid: int, is_wanted: Callable[[str], bool]) -> Iterator[int]:
    """Of those of the process (host pid) whose link in /proc leads to something wanted; each open until the next. None
    of a process that is gone."""
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            for link in Path(f"/proc/{pid}/fd").iterdir():
                if is_wanted(os.fsdecode(link.readlink())):
                    copy = _libc.syscall(PIDFD_GETFD, pidfd, int(link.name), 0)
                    if copy >= 0:
                        try:
                            yield copy
                        finally:
                            os.close(copy)
        finally:
            os.close(pidfd)


_libc = ctypes.CDLL(None, use_errno=True)
