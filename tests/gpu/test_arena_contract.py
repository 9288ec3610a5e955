"""One contract for every arena: shared memory on the CPU, CUDA virtual memory on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from belayer.gpu.arena import ArenaOwner, open_owner
from tests.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_GPU = HAS_TORCH and Path("/dev/nvidiactl").exists()
SIZES = {"cpu": 5 * (1 << 20) + 4096, "cuda:0": int(os.environ.get("BELAYER_TEST_ARENA_MIB", "1030")) << 20}

pytestmark = pytest.mark.skipif(not HAS_TORCH, reason="torch is SGLang's; scripts/sglang_cpu.sh brings it")


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.skipif(not HAS_GPU, reason="no GPU"))])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def owner(device: str) -> ArenaOwner:
    return open_owner(device)


class Child:
    """A process that was lent memory, and what it says."""

    def __init__(self, fds: list[int], device: str, size_bytes: int, verb: str) -> None:
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(DEADLINE_S)
        command = [sys.executable, "-m", "tests.gpu.arena_child", str(theirs.fileno()), device, str(size_bytes), verb]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT, stderr=subprocess.PIPE)
        theirs.close()
        socket.send_fds(self.connection, [b"x"], fds)
        for fd in fds:
            os.close(fd)

    def says(self) -> bytes:
        """What comes next; empty when the child has ended."""
        try:
            return self.connection.recv(100)
        except ConnectionError:
            return b""

    def end(self) -> tuple[int, str]:
        self.connection.close()
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors.decode(errors="replace")


def test_what_one_process_wrote_the_next_one_reads(device: str, owner: ArenaOwner) -> None:
    memory = owner.create(SIZES[device])
    writer = Child([owner.export(memory, writable=True)], device, memory.size_bytes, "fill")
    assert writer.says() == b"right", writer.end()
    writer.process.kill()
    writer.end()
    reader = Child([owner.export(memory, writable=False)], device, memory.size_bytes, "read")
    assert reader.says() == b"right", reader.end()
    assert reader.end()[0] == 0
    owner.release(memory)


def test_a_write_through_a_read_only_mapping_hits_the_writer_and_nothing_else(device: str, owner: ArenaOwner) -> None:
    memory = owner.create(SIZES[device])
    writer = Child([owner.export(memory, writable=True)], device, memory.size_bytes, "fill")
    assert writer.says() == b"right", writer.end()
    writer.end()
    trespasser = Child([owner.export(memory, writable=False)], device, memory.size_bytes, "trespass")
    assert trespasser.says() == b"about to write"
    assert trespasser.says() == b""
    assert trespasser.end()[0] != 0
    reader = Child([owner.export(memory, writable=False)], device, memory.size_bytes, "read")
    assert reader.says() == b"right", reader.end()
    reader.end()
    owner.release(memory)


def test_scratch_gives_way_to_the_memory_first_to_read_then_to_write(device: str, owner: ArenaOwner) -> None:
    memory = owner.create(SIZES[device])
    writer = Child([owner.export(memory, writable=True)], device, memory.size_bytes, "fill")
    assert writer.says() == b"right", writer.end()
    writer.end()
    fds = [owner.export(memory, writable=writable) for writable in (False, True)]
    shadow = Child(fds, device, memory.size_bytes, "scratch")
    assert shadow.says() == b"right", shadow.end()
    assert shadow.says() == b"right", shadow.end()
    assert shadow.end()[0] == 0
    owner.release(memory)


def test_sizes_are_rounded_up_to_the_granularity(device: str, owner: ArenaOwner) -> None:
    memory = owner.create(owner.granularity_bytes + 1)
    assert memory.size_bytes == 2 * owner.granularity_bytes
    owner.release(memory)
