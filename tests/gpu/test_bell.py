"""The bell rings when the thread that armed it dies, and not before."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from belayer.gpu.bell import BELL_BYTES, Bell
from tests.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
HOLDER = """
import ctypes, mmap, sys
from belayer.gpu.bell import Bell
memory = mmap.mmap(int(sys.argv[1]), 4096)
Bell(ctypes.addressof(ctypes.c_char.from_buffer(memory))).arm()
print("armed", flush=True)
sys.stdin.read()
"""


def test_it_rings_when_its_process_is_killed_and_not_when_it_is_stopped() -> None:
    fd = os.memfd_create("bell")
    os.ftruncate(fd, 4096)
    memory = mmap.mmap(fd, 4096)
    bell = Bell(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(fd)], pass_fds=[fd], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"armed\n"
    rang = threading.Event()
    threading.Thread(target=lambda: (bell.wait(), rang.set()), daemon=True).start()
    holder.send_signal(signal.SIGSTOP)
    assert not rang.wait(0.3)
    holder.kill()
    assert rang.wait(DEADLINE_S)
    bell.wait()  # and for whoever asks later
    holder.communicate(timeout=DEADLINE_S)
    os.close(fd)
    assert BELL_BYTES <= 4096
