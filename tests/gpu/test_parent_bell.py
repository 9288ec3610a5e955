"""Children end when their parent's main thread is gone, though the parent's process is not yet."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
EXIT = {"x86_64": 60, "aarch64": 93}.get(os.uname().machine)
"""The system call that ends the calling thread alone."""
CHILD = """
import sys, threading
from belayer.gpu.parent_bell import end_with
end_with(sys.argv[1])
print("tied", flush=True)
threading.Event().wait()
"""
PARENT = """
import ctypes, subprocess, sys, threading
from belayer.gpu.parent_bell import offer
command = [sys.executable, "-c", sys.argv[1], offer()]
children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
assert all(child.stdout.readline() == b"tied\\n" for child in children)
threading.Thread(target=lambda: ([child.wait() for child in children], print("gone", flush=True))).start()
print("ready", flush=True)
sys.stdin.readline()
assert all(child.poll() is None for child in children)
ctypes.CDLL(None).syscall(int(sys.argv[2]), 0)
"""


@pytest.mark.skipif(EXIT is None, reason="the number of the system call exit is not known for this processor")
def test_children_end_with_their_parents_main_thread_and_not_before() -> None:
    command = [sys.executable, "-c", PARENT, CHILD, str(EXIT)]
    parent = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert parent.stdin is not None and parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.stdin.write(b"end\n")
        parent.stdin.flush()
        assert select.select([parent.stdout], [], [], DEADLINE_S)[0], "the children live on"
        assert parent.stdout.readline() == b"gone\n", "said by the parent's other thread"
    finally:
        parent.kill()
        parent.communicate(timeout=DEADLINE_S)
