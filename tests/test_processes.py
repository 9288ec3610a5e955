"""Processes: what is alive, and that a kill is proved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from belayer.processes import is_alive, kill, open_pidfd, start_ticks
from tests.waiting import until

WITHOUT_ITS_FIRST_THREAD = """
import ctypes, sys, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def python(program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_a_process_whose_first_thread_has_ended_is_alive_until_it_is_killed() -> None:
    with python(WITHOUT_ITS_FIRST_THREAD) as process:
        ticks = start_ticks(process.pid)
        await until(lambda: state(process.pid) == "Z", what="the end of the first thread")
        assert is_alive(process.pid, ticks)
        await kill(process.pid, ticks)
        assert process.poll() is not None
        assert not is_alive(process.pid, ticks) and open_pidfd(process.pid, ticks) is None


async def test_a_zombie_is_dead() -> None:
    with python("") as process:
        ticks = start_ticks(process.pid)
        await until(lambda: state(process.pid) == "Z", what="its end")
        assert not is_alive(process.pid, ticks)
        await kill(process.pid, ticks)
