"""Operating-system processes, named so that a reused pid is never taken for the one that was meant.

A process is (pid, start ticks): field 22 of /proc/PID/stat, proc(5), the clock ticks after boot at which it started.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import socket
import threading
from pathlib import Path

from belayer.errors import BelayerError


class StillAliveError(BelayerError):
    """A process that was killed is still there after the deadline (in uninterruptible sleep, most likely)."""

    def __init__(self, pid: int, waited_s: float) -> None:
        super().__init__(f"process {pid} is still there {waited_s:.1f} s after SIGKILL")
        self.pid = pid
        self.waited_s = waited_s


def host_name() -> str:
    """How events name this machine."""
    return socket.gethostname()


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks after boot; 0 when there is no such process or only its zombie.

    A process whose first thread alone has ended looks like a zombie, and its other threads (field 20) run on.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    state, *fields = stat[stat.rindex(b")") + 2 :].split()
    return 0 if state in (b"Z", b"X") and int(fields[16]) <= 1 else int(fields[18])


def is_alive(pid: int, ticks: int) -> bool:
    """Whether exactly that process runs."""
    return ticks > 0 and start_ticks(pid) == ticks


def open_pidfd(pid: int, ticks: int) -> int | None:
    """A file descriptor, the caller's to close, that turns readable when the process ends; None when it is gone."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None  # the id is a thread's of another process now
        raise
    if is_alive(pid, ticks):
        return fd
    os.close(fd)
    return None


async def wait_exit(pid: int, ticks: int) -> None:
    """Return once the process has ended; at once when it already has. Needs no polling."""
    fd = open_pidfd(pid, ticks)
    if fd is not None:
        try:
            await _ended(fd)
        finally:
            os.close(fd)


async def _ended(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    loop.add_reader(fd, lambda: ended.done() or ended.set_result(None))
    try:
        await ended
    finally:
        loop.remove_reader(fd)


async def kill(pid: int, ticks: int, timeout_s: float = 10.0) -> None:
    """SIGKILL the process and return once it is proved gone. StillAliveError when it is not within the time."""
    fd = open_pidfd(pid, ticks)
    if fd is None:
        return
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        await asyncio.wait_for(_ended(fd), timeout_s)
    except ProcessLookupError:
        return
    except TimeoutError:
        raise StillAliveError(pid, timeout_s) from None
    finally:
        os.close(fd)


def exit_with_owner(owner_pid: int, owner_ticks: int = 0) -> None:
    """End this process at once when its owner has ended. For processes that must outlive their parent."""
    fd = open_pidfd(owner_pid, owner_ticks or start_ticks(owner_pid))
    if fd is None:
        os._exit(0)

    def watch() -> None:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll()
        os._exit(0)

    threading.Thread(target=watch, name="owner-watch", daemon=True).start()
