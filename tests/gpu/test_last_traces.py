"""A kill is over once all of the engine's processes are gone, and no GPU lists one of them any more."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from belayer.gpu import last_traces
from belayer.gpu.protocol import EngineProcess
from belayer.gpu.sglang_host import SglangHost
from belayer.gpu.usage import processes_of
from belayer.processes import host_name, start_ticks, wait_exit
from tests.gpu.recorded_nvml import RecordedGpu, replay
from tests.waiting import until, within

FAMILY = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], stdin=sys.stdin); input()"
"""A process and its child, both until their standard input ends; the child survives the parent's SIGKILL."""


@pytest.fixture
async def engine() -> AsyncIterator[EngineProcess]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", FAMILY, stdin=asyncio.subprocess.PIPE)
    await until(lambda: len(processes_of(process.pid)) == 2, what="its child")
    yield EngineProcess("a", host_name(), process.pid, start_ticks(process.pid), "http://127.0.0.1:9")
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()


def a_host(tmp_path: Path) -> SglangHost:
    return SglangHost(None, [], tmp_path, owner_pid=os.getpid())


async def test_a_scheduler_that_outlives_its_engine_is_killed_too(
    engine: EngineProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_traces, "_END_S", 0.1)
    child = max(processes_of(engine.pid))
    await a_host(tmp_path).kill(engine)
    assert start_ticks(engine.pid) == start_ticks(child) == 0


async def test_a_kill_waits_until_no_gpu_lists_the_process(
    engine: EngineProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With recorded answers in NVML's place (see recorded_nvml.py): no machine of CI has a GPU."""
    monkeypatch.setattr(last_traces, "_END_S", 0.1)
    gpu = RecordedGpu("0000:1B:00.0", running=[1, engine.pid])
    replay(monkeypatch, [gpu], visible=[gpu])
    killed = asyncio.create_task(a_host(tmp_path).kill(engine))
    await wait_exit(engine.pid, engine.pid_start_ticks)
    asked = gpu.asked
    await until(lambda: gpu.asked > asked + 2, what="looks at the GPU")
    assert not killed.done(), "its memory is still there"
    gpu.running = [1]
    await within(killed)


async def test_gpu_memory_that_stays_is_said_and_holds_nobody_up(
    engine: EngineProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With recorded answers in NVML's place (see recorded_nvml.py)."""
    monkeypatch.setattr(last_traces, "_END_S", 0.1)
    monkeypatch.setattr(last_traces, "_LET_GO_S", 0.2)
    gpu = RecordedGpu("0000:1B:00.0", running=[engine.pid])
    replay(monkeypatch, [gpu], visible=[gpu])
    await within(a_host(tmp_path).kill(engine))
    assert f"the GPU still has its memory of {engine.pid}" in caplog.text


async def test_a_driver_that_cannot_tell_holds_nobody_up(
    engine: EngineProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With recorded answers in NVML's place (see recorded_nvml.py): the package is newer than the driver."""
    monkeypatch.setattr(last_traces, "_END_S", 0.1)
    gpu = RecordedGpu("0000:1B:00.0", running=[engine.pid], driver_is_old=True)
    replay(monkeypatch, [gpu], visible=[gpu])
    await within(a_host(tmp_path).kill(engine))
    assert gpu.asked == 1 and start_ticks(engine.pid) == 0
