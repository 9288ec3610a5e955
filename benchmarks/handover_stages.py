"""Stages of the handover benchmark other than the kills; each puts what it finds into the dictionary it is given."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from benchmarks.handover_bench import ROOT, Bench, gpu_processes
from benchmarks.handover_figures import agreement, without_tokens


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
    """Twice; the second time everything is cached."""
    assert bench.main is not None
    found |= without_tokens(await bench.throughput(bench.main))
    found["again"] = without_tokens(await bench.throughput(bench.main))


async def plain(bench: Bench, found: dict[str, Any]) -> None:
    if bench.main is not None:
        await bench.host.kill(bench.main)
    await bench.close()  # its arena and a plain engine's cache may not fit beside each other
    host = bench.make_host(None)
    began_s = time.monotonic()
    plain_engine = await host.start("plain", "main")
    found["cold_start_s"] = round(time.monotonic() - began_s, 2)
    bench.save()
    found |= without_tokens(await bench.throughput(plain_engine))
    found["again"] = without_tokens(await bench.throughput(plain_engine))
    await host.kill(plain_engine)
