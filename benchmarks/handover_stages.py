"""Stages of the handover benchmark other than the kills; each puts what it finds into the dictionary it is given."""

# SGLang is not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any

from belayer.gpu.protocol import EngineProcess
from benchmarks.handover_bench import ROOT, Bench, gpu_processes
from benchmarks.handover_figures import agreement, without_tokens

_PAIRS = 7
"""Updates of each engine and way; the first is not counted."""


async def arena(bench: Bench, found: dict[str, Any]) -> None:
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
    found |= {"exit_status": process.returncode, "said": said.decode(errors="replace")[-6000:]}


async def engine(bench: Bench, found: dict[str, Any]) -> None:
    bench.start_memory()
    began_s = time.monotonic()
    bench.main = await bench.host.start("main", "main")
    found["start_s"] = round(time.monotonic() - began_s, 2)
    bench.save()
    if bench.options.overlap:
        bench.first_wave = asyncio.create_task(bench.shadows(min(bench.options.wave, len(bench.options.kills))))
    load = bench.options.kills[0].load if bench.options.kills else bench.options.load
    first = await bench.throughput(bench.main, load)
    again = await bench.throughput(bench.main, load)
    bench.reference[load] = again["token_ids"]
    found |= without_tokens(first) | {"again": without_tokens(again)}
    found["undisturbed_equal"] = agreement(first["token_ids"], again["token_ids"])
    found["gpu"] = gpu_processes()


async def steady(bench: Bench, found: dict[str, Any]) -> None:
    assert bench.main is not None
    await _rates(bench, bench.main, found)


async def _rates(bench: Bench, engine: EngineProcess, found: dict[str, Any]) -> None:
    """Throughput: three times, after one in which the prompts are cached."""
    await bench.throughput(engine)
    rates = [(await bench.throughput(engine))["tokens_per_s"] for _ in range(3)]
    found |= {"tokens_per_s": statistics.median(rates), "each": rates}


async def rearm(bench: Bench, found: dict[str, Any]) -> None:
    """Throughput of the main while a shadow starts, against what it is before and after."""
    assert bench.main is not None
    quiet = [(await bench.throughput(bench.main))["tokens_per_s"]]
    during: list[float] = []
    began_s = time.monotonic()
    starting = asyncio.create_task(bench.shadows(1))
    while not starting.done():
        during.append((await bench.throughput(bench.main))["tokens_per_s"])
    found["shadow_start_s"] = round(time.monotonic() - began_s, 2)
    quiet.append((await bench.throughput(bench.main))["tokens_per_s"])
    found |= {"quiet_tokens_per_s": quiet, "during_tokens_per_s": during}
    found["ratio"] = round(statistics.median(during) / statistics.median(quiet), 4)
    for shadow in await starting:
        if isinstance(shadow, BaseException):
            raise shadow
        await bench.host.kill(shadow)


async def update(bench: Bench, found: dict[str, Any]) -> None:
    assert bench.main is not None
    found |= await _give_weights(bench, bench.main)


async def _give_weights(bench: Bench, engine: EngineProcess) -> dict[str, Any]:
    """Seconds that updates take, from another process: tensors by handle in buckets and a folder, or a broadcast."""
    options, folder = bench.options, bench.work / "update"

    async def trainer(*arguments: str) -> list[float]:
        command = [sys.executable, "-m", "benchmarks.weight_sender", engine.address, "--shape", options.shape]
        command += ["--device", options.device, "--folder", str(folder), "--ranks", str(options.tp), *arguments]
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
        try:
            said, _ = await process.communicate()
        except BaseException:
            process.kill()
            raise
        return json.loads(said)["took_s"]

    if options.trainer_device:
        broadcast = ("--how", "distributed", "--device", options.trainer_device, "--repeat", "6", "--version", "13")
        return {"distributed_s": await trainer(*broadcast)}
    found: dict[str, Any] = {}
    found["tensor_s"] = await trainer("--how", "tensor", "--repeat", "6")
    if not folder.exists():
        found["save_s"] = await trainer("--how", "save")
    found["disk_s"] = await trainer("--how", "disk", "--repeat", "6", "--version", "7")
    return found


async def pair(bench: Bench, found: dict[str, Any]) -> None:
    """Updates of a main and of a plain engine beside it, in turns, so that both see the same machine and file.

    Starts what is not there; both must fit on the device. `cpu_s`: processor time of all of an engine's processes.
    """
    options = bench.options
    if bench.main is None:
        bench.start_memory()
        bench.main = await bench.host.start("main", "main")
    host = bench.make_host(None)
    save = ["--shape", options.shape, "--device", options.device, "--folder", str(bench.work / "update")]
    async with _trainer(bench, save) as ask:
        _, other = await asyncio.gather(ask("-", "save"), host.start("plain", "main"))
        await asyncio.to_thread(os.sync)
        engines = [("ours", bench.main), ("plain", other)]
        found |= {how: {"ours_s": [], "plain_s": [], "ours_cpu_s": [], "plain_cpu_s": []} for how in ("disk", "tensor")}
        for number in range(_PAIRS):
            for how in ("disk", "tensor"):
                for name, engine in engines if number % 2 else reversed(engines):
                    before_s = session_cpu_s(engine.pid)
                    took_s = (await ask(engine.address, how, "--version", str(1 + number)))["took_s"]
                    found[how][f"{name}_s"] += took_s
                    found[how][f"{name}_cpu_s"].append(round(session_cpu_s(engine.pid) - before_s, 2))
            bench.save()
    await host.kill(other)


@contextlib.asynccontextmanager
async def _trainer(
    bench: Bench, arguments: list[str]
) -> AsyncGenerator[Callable[..., Coroutine[Any, Any, dict[str, Any]]]]:
    """One trainer for many updates: `await ask(url, how, *more)` is what it answers."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.weight_sender",
        cwd=ROOT, env=bench.environment(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    to, of = process.stdin, process.stdout

    async def ask(url: str, how: str, *more: str) -> dict[str, Any]:
        to.write(shlex.join([url, "--how", how, *arguments, *more]).encode() + b"\n")
        answer = json.loads(await of.readline())
        if "refused" in answer:
            raise RuntimeError(answer["refused"])
        return answer

    try:
        yield ask
    finally:
        process.kill()
        await process.wait()


def session_cpu_s(leader: int) -> float:
    """Processor time so far of all processes in a session, proc(5)."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = stat.read_bytes().rpartition(b")")[2].split()  # a process's name may be no text
            if int(fields[3]) == leader:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def cache(bench: Bench, found: dict[str, Any]) -> None:
    """A rival: SGLang's own weight cache, from which a new engine takes the weights; its start is the recovery."""
    from sglang.srt.weight_cache.protocol import get_ready_path

    await bench.end_main()
    ready = Path(get_ready_path(0))
    command = [sys.executable, "-m", "sglang.srt.weight_cache.daemon", "--load-format", "dummy"]
    command += ["--gpu-id", "0", "--tp-size", "1", "--model-path", str(bench.work / f"model-{bench.options.shape}")]
    began_s = time.monotonic()
    with (bench.logs / "weight-cache.log").open("ab") as log:
        daemon = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=bench.environment())
    try:
        while not ready.exists():
            if daemon.returncode is not None:
                raise RuntimeError("SGLang's weight cache did not start; see weight-cache.log")
            await asyncio.sleep(0.1)
        found["daemon_start_s"] = round(time.monotonic() - began_s, 2)
        host = bench.make_host(None, "--weight-cache-mode", "client")
        began_s = time.monotonic()
        engine = await host.start("cached", "main")
        found["start_s"] = round(time.monotonic() - began_s, 2)
        await host.kill(engine)
    finally:
        if daemon.returncode is None:
            daemon.kill()
            await daemon.wait()


async def plain(bench: Bench, found: dict[str, Any]) -> None:
    await bench.end_main()
    host = bench.make_host(None)
    began_s = time.monotonic()
    plain_engine = await host.start("plain", "main")
    found["cold_start_s"] = round(time.monotonic() - began_s, 2)
    bench.save()
    await _rates(bench, plain_engine, found)
    if "update" in bench.results["stages"]:
        bench.save()
        found["update"] = await _give_weights(bench, plain_engine)
    await host.kill(plain_engine)
