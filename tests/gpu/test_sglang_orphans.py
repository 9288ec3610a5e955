"""SGLang's processes end with the engine that spawned them, even when it dies while they still load."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from belayer.processes import is_alive, start_ticks
from benchmarks.sglang_shapes import write_model
from tests.gpu.sglang_cell import ARGUMENTS, PYTHON, ROOT
from tests.waiting import until

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not PYTHON, reason="SGLang is not installed; run scripts/sglang_cpu.sh"),
]


def loading(pid: int) -> dict[int, int]:
    """The processes that multiprocessing has spawned for this one and that load torch, with their start ticks."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = {}
    for child in children:
        with suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            spawned = b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
            if spawned and "libtorch" in Path(f"/proc/{child}/maps").read_text():
                found[int(child)] = start_ticks(int(child))
    return found


def started(command: list[str], settings: dict[str, str], ready_fd: int, log: Path) -> subprocess.Popen[bytes]:
    """The engine's process, writing to the log."""
    with log.open("wb") as out:
        return subprocess.Popen(
            command, pass_fds=[ready_fd], env={**os.environ, **settings}, stdout=out, stderr=subprocess.STDOUT
        )


async def test_an_engine_that_dies_while_it_starts_leaves_no_scheduler(tmp_path: Path) -> None:
    ready, ready_write = os.pipe()
    command = [PYTHON, "-m", "belayer.gpu.sglang_engine", "--incarnation", "a", "--role", "main"]
    command += ["--owner-pid", str(os.getpid()), "--ready-fd", str(ready_write)]
    command += ["--", "--model-path", str(write_model(tmp_path / "model", "tiny")), *ARGUMENTS.split()]
    settings = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    engine = started(command, settings, ready_write, tmp_path / "log")
    os.close(ready_write)
    try:
        spawned = await until(lambda: loading(engine.pid), what="the engine spawns its scheduler")
        os.kill(engine.pid, signal.SIGKILL)
        engine.wait()
        await until(lambda: not any(is_alive(*child) for child in spawned.items()), what="they have ended with it")
    finally:
        engine.kill()
        engine.wait()
        os.close(ready)
