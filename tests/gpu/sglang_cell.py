"""Real SGLang on the CPU in fp32, as the tests share it: one memory server, a main, and shadows that take over in turn.

Needs scripts/sglang_cpu.sh once; without it these tests are skipped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from belayer.errors import EngineFailedError
from belayer.gpu.protocol import EngineProcess, Sampling
from belayer.gpu.sglang_host import SglangHost
from benchmarks.sglang_shapes import write_model, write_plugins
from tests.waiting import DEADLINE_S, within

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 1200
PROMPTS = [[3 + (7 * n + k) % 500 for k in range(40 + 11 * n)] for n in range(4)]
ARGUMENTS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --dtype float32 --load-format dummy"
)
ARGUMENTS += " --skip-tokenizer-init --skip-server-warmup --grammar-backend none --incremental-streaming-output"
ARGUMENTS += " --max-total-tokens 16384 --max-running-requests 8 --sleep-on-idle --random-seed 1"


def sglang_python() -> str:
    """The interpreter that has SGLang; empty when it is not installed."""
    found = subprocess.run([ROOT / "scripts/sglang_cpu.sh", "where"], capture_output=True, text=True, check=False)
    return os.environ.get("BELAYER_SGLANG_PYTHON") or found.stdout.strip()


PYTHON = sglang_python()
MARKS = [
    pytest.mark.sglang,
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.skipif(not PYTHON, reason="SGLang is not installed; run scripts/sglang_cpu.sh"),
]
ENVIRONMENT = {
    "BELAYER_BENCH_WEIGHTS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def start_memory(socket_path: Path) -> subprocess.Popen[bytes]:
    """A memory server for the CPU, ready."""
    ready, ready_write = os.pipe()
    command = [PYTHON, "-m", "belayer.gpu.memory_main", "--device", "cpu", "--socket", str(socket_path)]
    command += ["--owner-pid", str(os.getpid()), "--ready-fd", str(ready_write)]
    memory = subprocess.Popen(command, pass_fds=[ready_write], cwd=ROOT)
    os.close(ready_write)
    with os.fdopen(ready, "rb") as line:
        assert line.readline() == b"ready\n"
    return memory


@dataclass
class Cell:
    """A device with its memory server and engines."""

    host: SglangHost
    folder: Path
    main: EngineProcess
    shadows: list[EngineProcess]
    undisturbed: list[list[int]] = field(default_factory=list)


async def cell(folder: Path, ranks: int = 1, shadows: int = 2) -> AsyncIterator[Cell]:
    """The fixture's body: everything started, with armed shadows, and what the prompts give undisturbed."""
    sockets = [folder / "memory.sock"] if ranks == 1 else [folder / f"memory{rank}.sock" for rank in range(ranks)]
    servers = [start_memory(socket) for socket in sockets]
    host = SglangHost(
        sockets[0] if ranks == 1 else folder / "memory{rank}.sock",
        ["--model-path", str(write_model(folder / "model", "tiny")), *ARGUMENTS.split(), "--tp-size", str(ranks)],
        folder / "logs",
        owner_pid=os.getpid(),
        python=PYTHON,
        environment=ENVIRONMENT
        | {
            "PYTHONPATH": os.pathsep.join([str(write_plugins(folder / "plugins")), str(ROOT)]),
            "BELAYER_ZOMBIE_FOLDER": str(folder),
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * ranks) if ranks > 1 else "all",
            "TORCHDYNAMO_DISABLE": "1",  # SGLang compiles one small function with more than one rank, for half a minute
        },
    )
    main = await host.start("main", "main")
    names = [f"shadow{number}" for number in range(1, shadows + 1)]
    made = Cell(host, folder, main, list(await asyncio.gather(*(host.start(name, "shadow") for name in names))))
    made.undisturbed = await asyncio.gather(*(ask(made, f"u{n}", prompt) for n, prompt in enumerate(PROMPTS)))
    yield made
    for engine in (made.main, *made.shadows):
        await host.kill(engine)
    for memory in servers:
        memory.terminate()
        memory.wait(DEADLINE_S)


async def ask(
    cell: Cell, name: str, prompt: list[int], have: list[int] | None = None, resumes: str = "", until: int = TOKENS
) -> list[int]:
    """All tokens of a request to the main, or those that it gave before its stream broke."""
    tokens = [] if have is None else have
    client = cell.host.connect(cell.main)
    try:
        left = Sampling(max_new_tokens=until - len(tokens))
        async for batch in client.generate(name, prompt + tokens, left, resumes=resumes):
            tokens += batch.token_ids
    except EngineFailedError:
        pass
    finally:
        await client.close()
    return tokens


async def run_through_a_failure(
    cell: Cell, tag: str, strike: signal.Signals, rank: int = 0
) -> tuple[list[list[int]], list[str]]:
    """Strike one of the main's schedulers when every stream has some tokens; resume all of them on the next shadow."""
    watching = asyncio.Event()
    events = cell.host.events(watching)
    parts: list[list[int]] = [[] for _ in PROMPTS]
    streams = [asyncio.create_task(ask(cell, f"{tag}{n}", prompt, parts[n])) for n, prompt in enumerate(PROMPTS)]
    first_event = asyncio.ensure_future(anext(events))
    await watching.wait()
    while not all(len(part) > 20 for part in parts):
        await asyncio.wait(streams, timeout=0.01)
    status = (await cell.host.statuses())[rank]
    os.kill(next(engine.pid for engine in status.engines if engine.holds_arena), strike)
    kinds = [(await within(first_event)).kind]
    while kinds[-1] != "dying":
        kinds.append((await within(anext(events))).kind)
    old, cell.main = cell.main, cell.shadows.pop(0)
    await cell.host.promote(cell.main)
    await events.aclose()
    await cell.host.kill(old)
    await asyncio.wait(streams, timeout=DEADLINE_S)
    assert all(0 < len(part) < TOKENS for part in parts), "the failure came too late to break the streams"
    await asyncio.gather(*(ask(cell, f"{tag}{n}r", PROMPTS[n], parts[n], f"{tag}{n}") for n in range(len(PROMPTS))))
    return parts, kinds
