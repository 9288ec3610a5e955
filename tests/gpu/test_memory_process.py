"""A memory server started on demand: once, again when it died, and an honest error when it cannot be."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from belayer.errors import UnguardedMainError
from belayer.gpu.errors import ArenaError, ArenaRefusedError
from belayer.gpu.memory_process import MemoryProcess, ask_status
from belayer.gpu.sglang_host import SglangHost
from belayer.processes import kill, start_ticks
from tests.waiting import until


def pid_of(socket: Path) -> int:
    """The server's process: it has the socket's path on its command line."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if str(socket).encode() in words:
                return int(folder.name)
    return 0


async def test_whoever_comes_first_starts_it_and_it_is_started_again_when_it_died(tmp_path: Path) -> None:
    memory = MemoryProcess("cpu", tmp_path / "run" / "memory.sock", os.getpid(), log=tmp_path / "log")
    started = await asyncio.gather(*(memory.ensure() for _ in range(4)))
    assert sorted(started) == [False, False, False, True]
    assert ask_status(memory.socket).device == "cpu"
    first = pid_of(memory.socket)
    os.kill(first, signal.SIGKILL)
    await until(lambda: not start_ticks(first), what="its end")
    with pytest.raises(ArenaError, match="no answer"):
        ask_status(memory.socket)
    assert await memory.ensure()
    second = pid_of(memory.socket)
    assert second not in (0, first) and ask_status(memory.socket).epoch == 0
    await kill(second, start_ticks(second))


async def test_one_that_does_not_start_says_where_its_log_is(tmp_path: Path) -> None:
    memory = MemoryProcess("nosuch", tmp_path / "memory.sock", os.getpid(), log=tmp_path / "log")
    with pytest.raises(ArenaRefusedError, match=f"see {tmp_path}/log"):
        await memory.ensure(20.0)
    assert "not a device" in (tmp_path / "log").read_text()


async def test_a_shadow_is_not_started_beside_nothing(tmp_path: Path) -> None:
    memory = MemoryProcess("cpu", tmp_path / "memory.sock", os.getpid(), log=tmp_path / "log")
    host = SglangHost(None, [], tmp_path / "logs", owner_pid=os.getpid(), memory=memory)
    with pytest.raises(UnguardedMainError, match="no answer from the memory server"):
        await host.start("shadow", "shadow")
    await memory.ensure()
    with pytest.raises(UnguardedMainError, match="no main holds"):
        await host.start("shadow", "shadow")
    pid = pid_of(memory.socket)
    await kill(pid, start_ticks(pid))
