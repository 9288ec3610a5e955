"""One run of the handover benchmark: its options, where it writes, its memory server and engines."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from belayer.gpu.http_engine import HttpEngine
from belayer.gpu.protocol import EngineProcess
from belayer.gpu.sglang_host import SglangHost
from benchmarks.handover_figures import brief
from benchmarks.handover_loads import Load
from benchmarks.handover_streams import Stream, Streams
from benchmarks.sglang_shapes import SHAPES, write_model, write_plugins

ROOT = Path(__file__).resolve().parent.parent
_LOG_HEAD_BYTES, _LOG_TAIL_BYTES = 60_000, 200_000


class Bench:
    """Made with `benchmarks.handover`'s options and a working folder; `close` it."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options = options
        self.work = work
        self.out: Path = options.out
        self.began_s = time.monotonic()
        self.results: dict[str, Any] = {
            "options": {
                name: value if isinstance(value, int | float | str) else str(value)
                for name, value in vars(options).items()
                if name not in ("out", "kills")
            },
            "machine": _machine(),
            "stages": {},
        }
        self.loads = {options.load, *(kill.load for kill in options.kills)}
        self.logs = work / "logs"
        self.socket = work / ("memory.sock" if options.tp == 1 else "memory{rank}.sock")
        self.zombies = work / "zombies"
        self.zombies.mkdir()
        self.memory: list[subprocess.Popen[bytes]] = []
        self.host = self.make_host(self.socket)
        self.main: EngineProcess | None = None
        self.reference: dict[Load, list[list[int]]] = {}
        self.first_wave: asyncio.Task[list[EngineProcess | BaseException]] | None = None
        self._engines = 0

    @property
    def left_s(self) -> float:
        return self.options.budget_s - (time.monotonic() - self.began_s)

    def save(self) -> None:
        (self.out / "handover.json").write_text(json.dumps(self.results, indent=1))
        with (self.out / "engines.log").open("wb") as together:
            for log in sorted(self.logs.glob("*.log")):
                text = log.read_bytes()
                together.write(b"\n===== " + log.name.encode() + b"\n" + text[:_LOG_HEAD_BYTES])
                if len(text) > _LOG_HEAD_BYTES:
                    together.write(b"\n[...]\n" + text[_LOG_HEAD_BYTES:][-_LOG_TAIL_BYTES:])

    async def stage(
        self, name: str, work: Callable[[Bench, dict[str, Any]], Awaitable[None]], *, keep_s: float = 0.0
    ) -> bool:
        """Run a stage within what is left, keep what it found, and say whether it went well."""
        began_s = time.monotonic()
        found: dict[str, Any] = {}
        self.results["stages"][name] = found
        try:
            async with asyncio.timeout(self.left_s - keep_s):
                await work(self, found)
        except Exception as error:  # noqa: BLE001  a stage's failure is a result; the next one may still work
            found["error"] = f"{type(error).__name__}: {error}"[-3000:]
        found["took_s"] = round(time.monotonic() - began_s, 3)
        print(f"[{time.monotonic() - self.began_s:6.1f} s] {name}: {brief(found)}", flush=True)
        self.save()
        return "error" not in found

    def environment(self) -> dict[str, str]:
        plugins = write_plugins(self.work / "plugins")
        path = os.pathsep.join([str(plugins), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "BELAYER_BENCH_WEIGHTS": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"SGLANG_DISABLE_VERSION_CHECK": "1", "BELAYER_ZOMBIE_FOLDER": str(self.zombies)}
        environment |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
        if self.options.device == "cpu":
            environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
            if self.options.tp > 1:
                environment |= {"SGLANG_CPU_OMP_THREADS_BIND": "|".join("0" * self.options.tp)}
                environment |= {"TORCHDYNAMO_DISABLE": "1"}
        return environment

    def make_host(self, memory_socket: Path | None, *arguments: str) -> SglangHost:
        options = self.options
        model = write_model(self.work / f"model-{options.shape}", options.shape)
        return SglangHost(
            memory_socket,
            ["--model-path", str(model), *self._sglang_arguments(), *arguments],
            self.logs,
            owner_pid=os.getpid(),
            environment=self.environment(),
            start_timeout_s=options.start_timeout_s,
            warm_prompts=(4, 64, min(options.load.context, 2048)),
            warm_batch=options.load.streams,
            silence_s=60.0,
        )

    def _sglang_arguments(self) -> list[str]:
        options = self.options
        running = str(max(16, *(load.streams for load in self.loads)))
        tokens = max(load.streams * (load.context + options.tokens + 64) for load in self.loads)
        arguments = ["--load-format", "dummy", "--skip-tokenizer-init", "--skip-server-warmup", "--sampling-backend"]
        arguments += ["pytorch", "--grammar-backend", "none", "--incremental-streaming-output", "--random-seed", "1"]
        arguments += ["--max-running-requests", running, "--sleep-on-idle", "--max-total-tokens", str(tokens + 20480)]
        arguments += ["--tp-size", str(options.tp)]
        if options.device == "cpu":
            return [*arguments, "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"]
        arguments += ["--attention-backend", "triton", "--disable-prefill-cuda-graph", "--log-level", "info"]
        # NVLink multicast can put a shared host's GPUs out of service: only plain NCCL (see also sglang_shapes.py).
        arguments += ["--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"]
        if options.deterministic:  # of the same prefix the same token, whatever else is in the batch
            arguments += ["--enable-deterministic-inference"]
        return [*arguments, "--cuda-graph-max-bs", running, "--mem-fraction-static", "0.85"]

    def start_memory(self) -> None:
        """A memory server for each rank, on the devices from the first one on."""
        kind, _, index = self.options.device.partition(":")
        self.logs.mkdir(exist_ok=True)
        for rank in range(self.options.tp):
            ready_read, ready_write = os.pipe()
            device = f"{kind}:{int(index) + rank}" if index else kind
            command = [sys.executable, "-m", "belayer.gpu.memory_main", "--device", device]
            command += ["--socket", str(self.socket).replace("{rank}", str(rank)), "--owner-pid", str(os.getpid())]
            command += ["--ready-fd", str(ready_write), "--hang-s", str(self.options.hang_s)]
            with (self.logs / "memory.log").open("ab") as log:
                self.memory.append(subprocess.Popen(command, pass_fds=[ready_write], stdout=log, stderr=log, cwd=ROOT))
            os.close(ready_write)
            with os.fdopen(ready_read, "rb") as ready:
                if ready.readline() != b"ready\n":
                    raise RuntimeError("the memory server did not start; see memory.log")

    async def shadows(self, count: int) -> list[EngineProcess | BaseException]:
        names = [f"shadow{self._engines + number}" for number in range(1, count + 1)]
        self._engines += count
        return await asyncio.gather(*(self.host.start(name, "shadow") for name in names), return_exceptions=True)

    def streams(self, tag: str, engine: HttpEngine, load: Load) -> Streams:
        prompts = load.prompts(SHAPES[self.options.shape]["vocab_size"])
        tokens = self.options.tokens
        return Streams([Stream(f"{tag}-{n}", prompt, tokens) for n, prompt in enumerate(prompts)], engine)

    async def throughput(self, engine: EngineProcess, load: Load | None = None) -> dict[str, Any]:
        """Tokens a second over all streams: the sum of their rates over the second half of each.

        A caller that stalls for a moment gets many tokens at once: a window over all streams would count those twice.
        """
        client = self.host.connect(engine)
        run = self.streams("run", client, load or self.options.load)
        await run.run()
        await client.close()
        half = [(len(stream.arrived_s) // 2, stream.arrived_s) for stream in run.streams]
        return {
            "tokens_per_s": round(sum((len(at_s) - 1 - n) / (at_s[-1] - at_s[n]) for n, at_s in half), 2),
            "over_s": round(statistics.median(at_s[-1] - at_s[n] for n, at_s in half), 3),
            "token_ids": [stream.token_ids for stream in run.streams],
        }

    async def end_main(self) -> None:
        """The main and the memory servers: a plain engine's memory may not fit beside them."""
        if self.main is not None:
            await self.host.kill(self.main)
            self.main = None
        await self.close()

    async def close(self) -> None:
        for server in self.memory:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(server.wait, 10)
        self.memory.clear()


def run_command(*command: str) -> str:
    """What it says; empty when it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def gpu_processes() -> list[str]:
    """`pid, MiB` of every process on the GPU, after the total in use."""
    total = run_command("nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader")
    apps = run_command("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader")
    return [total, *apps.splitlines()]


def _machine() -> dict[str, Any]:
    gpu = run_command("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return {"python": platform.python_version(), "kernel": platform.release(), "cores": os.cpu_count(), "gpu": gpu}
