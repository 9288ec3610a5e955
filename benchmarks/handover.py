"""Kill a serving SGLang engine and measure how soon its streams go on, on the shadow that takes over.

    python -m benchmarks.handover --stage all --device cuda:0 --out DIR [--budget-s 560]

Stages, each with its own deadline and each recorded as soon as it ends, whatever happens to the others:

    arena    the arena's contract tests, on this device, beside the other stages
    engine   SGLang with memory server, arena and ledger: start, throughput, an undisturbed reference run
    kills    SIGKILL of the scheduler at varying instants; the shadow takes over, in one of three modes:
             early   it adopts the KV cache and does not wait for the dead process to be torn down
             late    it adopts the KV cache once the dead process is gone
             refill  it computes everything again, once the dead process is gone
    plain    SGLang without Belayer: cold start, throughput

The last line is one JSON object; DIR/handover.json has every kill with its phases, DIR/engines.log the engines' logs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from belayer.gpu import wire
from belayer.gpu.http_engine import HttpEngine
from belayer.gpu.protocol import EngineProcess
from belayer.gpu.sglang_host import SglangHost
from benchmarks.handover_figures import agreement, brief, headline, serializable, summary, without_tokens
from benchmarks.handover_streams import Stream, Streams
from benchmarks.sglang_shapes import SHAPES, write_model, write_plugins

ROOT = Path(__file__).resolve().parent.parent
_LOG_HEAD_BYTES, _LOG_TAIL_BYTES = 200_000, 400_000
STAGES = ("arena", "engine", "kills", "plain")


@dataclass(frozen=True)
class Mode:
    """How a shadow takes over."""

    name: str
    adopt: bool
    early: bool


MODES = {
    mode.name: mode for mode in (Mode("early", True, True), Mode("late", True, False), Mode("refill", False, False))
}


class Bench:
    """One run: its options, where it writes, and what it has found so far."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options = options
        self.work = work
        self.out: Path = options.out
        self.began_s = time.monotonic()
        self.results: dict[str, Any] = {
            "options": serializable({name: value for name, value in vars(options).items() if name != "out"}),
            "machine": _machine(),
            "stages": {},
        }
        self.logs = work / "logs"
        self.socket = work / "memory.sock"
        self.memory: subprocess.Popen[bytes] | None = None
        self.host = self._host(self.socket)
        self.main: EngineProcess | None = None
        self.reference: list[list[int]] = []
        self.engines = 0
        self.first_wave: asyncio.Task[list[EngineProcess | BaseException]] | None = None

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

    async def stage(self, name: str, work: Callable[[], Awaitable[dict[str, Any]]], limit_s: float) -> bool:
        """Run a stage within its time, keep what it found, and say whether it went well."""
        began_s = time.monotonic()
        limit_s = min(limit_s, self.left_s)
        found: dict[str, Any] = {}
        self.results["stages"][name] = found
        try:
            async with asyncio.timeout(limit_s):
                found |= await work()
        except Exception as error:  # noqa: BLE001  a stage's failure is a result; the next one may still work
            found["error"] = f"{type(error).__name__}: {error}"[-3000:]
        found["took_s"] = round(time.monotonic() - began_s, 3)
        print(f"[{time.monotonic() - self.began_s:6.1f} s] {name}: {brief(found)}", flush=True)
        self.save()
        return "error" not in found

    def _host(self, memory_socket: Path | None) -> SglangHost:
        options = self.options
        model = write_model(self.work / f"model-{options.shape}", options.shape)
        plugins = write_plugins(self.work / "plugins")
        path = os.pathsep.join([str(plugins), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {"PYTHONPATH": path, "BELAYER_BENCH_WEIGHTS": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"SGLANG_DISABLE_VERSION_CHECK": "1"}
        if options.device == "cpu":
            environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        return SglangHost(
            memory_socket,
            ["--model-path", str(model), *_sglang_arguments(options)],
            self.logs,
            owner_pid=os.getpid(),
            environment=environment,
            start_timeout_s=options.start_timeout_s,
            warm_prompts=(4, 64, min(options.context, 2048)),
            warm_batch=options.streams,
            silence_s=40.0,
        )

    # --- parts of stages ----------------------------------------------------------------------------------------

    def streams(self, tag: str, engine: HttpEngine, count: int, tokens: int) -> Streams:
        chosen = random.Random(17)
        vocabulary = SHAPES[self.options.shape]["vocab_size"]
        streams = [
            Stream(f"{tag}-{n}", [chosen.randrange(3, vocabulary) for _ in range(self.options.context)], tokens)
            for n in range(count)
        ]
        return Streams(streams, engine)

    async def throughput(self, engine: EngineProcess, tag: str) -> dict[str, Any]:
        """Tokens a second over all streams, from when each has its first tokens until the first one ends."""
        client = self.host.connect(engine)
        run = self.streams(tag, client, self.options.streams, self.options.tokens)
        await run.run()
        await client.close()
        begin_s = max(stream.arrived_s[8] for stream in run.streams)
        end_s = min(stream.arrived_s[-1] for stream in run.streams)
        tokens = sum(1 for stream in run.streams for at in stream.arrived_s if begin_s < at <= end_s)
        return {
            "tokens_per_s": round(tokens / (end_s - begin_s), 2),
            "over_s": round(end_s - begin_s, 3),
            "token_ids": [stream.token_ids for stream in run.streams],
        }

    def start_memory(self) -> None:
        ready_read, ready_write = os.pipe()
        command = [sys.executable, "-m", "belayer.gpu.memory_main", "--device", self.options.device]
        command += ["--socket", str(self.socket), "--owner-pid", str(os.getpid()), "--ready-fd", str(ready_write)]
        command += ["--hang-s", str(self.options.hang_s)]
        self.logs.mkdir(exist_ok=True)
        with (self.logs / "memory.log").open("ab") as log:
            self.memory = subprocess.Popen(command, pass_fds=[ready_write], stdout=log, stderr=log, cwd=ROOT)
        os.close(ready_write)
        with os.fdopen(ready_read, "rb") as ready:
            if ready.readline() != b"ready\n":
                raise RuntimeError("the memory server did not start; see memory.log")

    async def shadows(self, count: int) -> list[EngineProcess | BaseException]:
        names = [f"shadow{self.engines + number}" for number in range(1, count + 1)]
        self.engines += count
        return await asyncio.gather(*(self.host.start(name, "shadow") for name in names), return_exceptions=True)

    # --- stages -------------------------------------------------------------------------------------------------

    async def arena(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-c", "/dev/null"]
        command += ["--rootdir", str(ROOT), str(ROOT / "tests/gpu/test_arena_contract.py")]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            said, _ = await process.communicate()
        except BaseException:
            process.kill()
            raise
        return {"exit_status": process.returncode, "said": said.decode(errors="replace")[-6000:]}

    async def plain(self) -> dict[str, Any]:
        if self.main is not None:
            await self.host.kill(self.main)
        await self.close()  # its arena and a plain engine's cache may not fit beside each other
        host = self._host(None)
        began_s = time.monotonic()
        engine = await host.start("plain", "main")
        found: dict[str, Any] = {"cold_start_s": round(time.monotonic() - began_s, 2), "gpu": _gpu_processes()}
        found |= await self.throughput(engine, "plain")
        found |= {"again": without_tokens(await self.throughput(engine, "plain"))}
        await host.kill(engine)
        return without_tokens(found)

    async def engine(self) -> dict[str, Any]:
        self.start_memory()
        began_s = time.monotonic()
        self.main = await self.host.start("main", "main")
        found: dict[str, Any] = {"start_s": round(time.monotonic() - began_s, 2)}
        if self.options.overlap:
            self.first_wave = asyncio.create_task(self.shadows(self.options.wave))
        first = await self.throughput(self.main, "engine")
        again = await self.throughput(self.main, "engine")
        self.reference = again["token_ids"]
        found |= without_tokens(first) | {"again": without_tokens(again)}
        found["undisturbed_equal"] = agreement(first["token_ids"], again["token_ids"])
        found["gpu"] = _gpu_processes()
        return found

    async def kills(self) -> dict[str, Any]:
        """Kill main after main, each replaced by a shadow that was started beforehand, many shadows at a time."""
        options, stages = self.options, self.results["stages"]
        plan = [MODES["early"]] * options.kills + [MODES["late"]] * options.late_kills
        plan += [MODES["refill"]] * options.refills
        found: dict[str, Any] = {"waves": [], "failed_starts": [], "failed_kills": []}
        stages["kills"] = found
        chosen = random.Random(23)
        while plan and len(found["failed_kills"]) < 3:
            began_s = time.monotonic()
            wave, self.first_wave = self.first_wave, None
            started = await (wave or self.shadows(min(len(plan), options.wave)))
            shadows = [shadow for shadow in started if isinstance(shadow, EngineProcess)]
            found["failed_starts"] += [str(error)[-800:] for error in started if error not in shadows]
            if not shadows:
                raise RuntimeError("no shadow could be started")
            gpu = _gpu_processes()
            found["waves"].append({"shadows": len(shadows), "s": round(time.monotonic() - began_s, 2), "gpu": gpu})
            found["shadow_gpu_gb"] = _gpu_gb(gpu, await self.host.status(), shadows)
            found["arm"] = [self.host.facts[shadow.incarnation] for shadow in shadows][:3]
            self.save()
            for shadow in shadows[: len(plan)]:
                mode = plan.pop(0)
                try:
                    async with asyncio.timeout(60):
                        kill = await self._kill(shadow, mode, chosen)
                except Exception as error:  # noqa: BLE001  one kill that went wrong must not lose the others
                    found["failed_kills"].append(
                        {"mode": mode.name, "error": f"{type(error).__name__}: {error}"[-900:]}
                    )
                    self.save()
                    continue
                of_mode = stages.setdefault(mode.name, {"kills": []})
                of_mode["kills"].append(kill)
                of_mode |= summary(of_mode["kills"])
                self.save()
        return found

    async def _kill(self, shadow: EngineProcess, mode: Mode, chosen: random.Random) -> dict[str, Any]:
        assert self.main is not None
        self.host.adopt, self.host.early = mode.adopt, mode.early
        tokens = self.options.tokens
        old, new = self.host.connect(self.main), self.host.connect(shadow)
        run = self.streams("kill", old, self.options.streams, tokens)
        running = asyncio.create_task(run.run())
        await run.wait_tokens(chosen.randrange(tokens // 8, tokens // 2))
        previous, self.main = self.main, shadow
        status = await self.host.status()
        scheduler = next(engine.pid for engine in status.engines if engine.holds_arena)
        seen: dict[str, float] = {}
        dying, dead = asyncio.Event(), asyncio.Event()
        watching = asyncio.create_task(self._watch(previous.incarnation, seen, dying, dead))
        await asyncio.sleep(0.1)
        before = sum(len(stream.token_ids) for stream in run.streams)
        killed_s = time.monotonic()
        os.kill(scheduler, 9)
        await dying.wait()
        run.change(new)
        await self.host.promote(shadow)
        promoted_s = time.monotonic()
        await running
        await dead.wait()
        watching.cancel()
        await old.close()
        await new.close()
        await self.host.kill(previous)
        waits = sorted(stream.resumed_s[0] - killed_s for stream in run.streams if stream.resumed_s)
        return {
            "waits_s": [round(wait, 4) for wait in waits],
            "dying_s": round(seen["dying"] - killed_s, 4),
            "dead_s": round(seen["dead"] - killed_s, 4),
            "promoted_s": round(promoted_s - killed_s, 4),
            "phases": {name: round(value, 5) for name, value in self.host.facts[shadow.incarnation].items()},
            "tokens_before": before,
            "equal": agreement(self.reference, [stream.token_ids for stream in run.streams]),
        }

    async def _watch(self, incarnation: str, seen: dict[str, float], dying: asyncio.Event, dead: asyncio.Event) -> None:
        async for event in self.host.events():
            if event.incarnation == incarnation:
                seen.setdefault(event.kind, time.monotonic())
                if event.kind in ("dying", "dead"):
                    dying.set()
                if event.kind == "dead":
                    seen.setdefault("dying", seen["dead"])
                    dead.set()

    async def close(self) -> None:
        if self.memory is not None:
            self.memory.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.memory.wait, 10)


def _sglang_arguments(options: argparse.Namespace) -> list[str]:
    arguments = ["--load-format", "dummy", "--skip-tokenizer-init", "--skip-server-warmup", "--sampling-backend"]
    arguments += ["pytorch", "--grammar-backend", "none", "--incremental-streaming-output", "--random-seed", "1"]
    arguments += ["--max-running-requests", str(max(16, options.streams)), "--sleep-on-idle"]
    arguments += ["--max-total-tokens", str(options.streams * (options.context + options.tokens + 64) + 20480)]
    if options.device == "cpu":
        return [*arguments, "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"]
    arguments += ["--attention-backend", "triton", "--disable-prefill-cuda-graph", "--log-level", "info"]
    return [*arguments, "--cuda-graph-max-bs", str(max(16, options.streams)), "--mem-fraction-static", "0.85"]


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _gpu_processes() -> list[str]:
    """`pid, MiB` of every process on the GPU, and the total in use."""
    total = _run("nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader")
    return [total, *_run("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader").splitlines()]


def _gpu_gb(processes: list[str], status: wire.Status, shadows: list[EngineProcess]) -> float | None:
    """GPU memory of a shadow, context included: the median over these."""
    names = {shadow.incarnation for shadow in shadows}
    pids = {str(engine.pid) for engine in status.engines if engine.incarnation in names}
    used = [float(line.split(",")[1].split()[0]) for line in processes[1:] if line.split(",")[0] in pids]
    return round(statistics.median(used) * (1 << 20) / 1e9, 3) if used else None


def _machine() -> dict[str, Any]:
    gpu = _run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return {"python": platform.python_version(), "kernel": platform.release(), "cores": os.cpu_count(), "gpu": gpu}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    options.out.mkdir(parents=True, exist_ok=True)
    stages = STAGES if options.stage == "all" else tuple(options.stage.split(","))
    with tempfile.TemporaryDirectory(prefix="belayer-handover-") as folder:
        bench = Bench(options, Path(folder))
        try:
            beside = asyncio.create_task(bench.stage("arena", bench.arena, 150)) if "arena" in stages else None
            if await bench.stage("engine", bench.engine, 240) and "kills" in stages:
                await bench.stage("kills", bench.kills, bench.left_s - (90 if "plain" in stages else 0))
            if beside is not None:
                await beside
            if "plain" in stages and bench.left_s > 60:
                await bench.stage("plain", bench.plain, bench.left_s)
        finally:
            await bench.close()
        bench.results |= headline(bench.results["stages"])
        bench.save()
        return {name: value for name, value in bench.results.items() if name != "stages"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.handover", description=__doc__.splitlines()[0])
    parser.add_argument("--stage", default="all", help=f"all, or some of {','.join(STAGES)}")
    parser.add_argument("--device", default="cuda:0", help="cuda:N or cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="4b")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=400, help="tokens that each stream generates")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--late-kills", type=int, default=4)
    parser.add_argument("--refills", type=int, default=2)
    parser.add_argument("--wave", type=int, default=12, help="shadows that are started together")
    parser.add_argument("--overlap", action="store_true", help="start shadows during the throughput runs: saves time")
    parser.add_argument("--budget-s", type=float, default=560.0, help="the whole run ends within it")
    parser.add_argument("--hang-s", type=float, default=20.0, help="silence after which a scheduler counts as hung")
    parser.add_argument("--start-timeout-s", type=float, default=240.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(run(options))))


if __name__ == "__main__":
    main()
