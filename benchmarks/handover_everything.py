"""The handover benchmark's stage `everything`: throughput with all of Belayer on, against plain SGLang, in turns.

All is: the main with memory server, arena and ledger; a journal in a Redis of its own (mode everysec) and `belayer
gateway` before it, both processes; the detector on its worker. A plain SGLang stands beside it on the same device, and
the same callers ask each in turn, so that all see the same machine: `everything` through the gateway, `ours` the same
main without it, `plain`. With --apart, for engines that do not fit on the device together, plain's turns come last.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

from belayer import ids
from belayer.actors.actor import run_actor
from belayer.actors.detector import Detector
from belayer.gpu.protocol import EngineProcess
from belayer.journal.connect import open_store
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.events import WorkerReady, WorkerRegistered
from belayer.journal.writer import take_over
from belayer.processes import host_name
from benchmarks.handover_bench import ROOT, Bench
from benchmarks.handover_figures import agreement
from benchmarks.handover_stages import session_cpu_s

_WORKER = "everything"
_SHOWN = 400

Way = tuple[EngineProcess, EngineProcess]
"""Which engine works, and what is asked."""


async def everything(bench: Bench, found: dict[str, Any]) -> None:
    """`--rounds` rounds after one that is not counted. Starts what is not there.

    Tokens a second over the whole of a round, because the gateway's come many at a time. `engine_cpu_s`: processor time
    of an engine's processes. Where others use the machine too only the least of it says anything, the clock nothing.
    """
    if bench.main is None:
        bench.start_memory()
        bench.main = await bench.host.start("main", "main")
    host = bench.make_host(None)
    found |= {name: {"tokens_per_s": [], "engine_cpu_s": []} for name in ("everything", "ours", "plain")}
    found["load_average"] = []
    said: dict[str, list[list[int]]] = {}
    async with _gateway(bench, bench.main) as front:
        ways: dict[str, Way] = {"everything": (bench.main, front), "ours": (bench.main, bench.main)}
        plain = None if bench.options.apart else await host.start("plain", "main")
        if plain is not None:
            ways["plain"] = plain, plain
        await _in_turns(bench, ways, found, said)
    if plain is None:
        await bench.end_main()
        plain = await host.start("plain", "main")
        await _in_turns(bench, {"plain": (plain, plain)}, found, said)
    await host.kill(plain)
    for name in ("everything", "ours"):
        found[name]["equal"] = agreement(said["plain"], said[name])
        rates = [statistics.median(found[one]["tokens_per_s"]) for one in (name, "plain")]
        found[f"{name}_ratio"] = round(rates[0] / rates[1], 4)
        least_s = [min(found[one]["engine_cpu_s"]) for one in (name, "plain")]
        found[f"{name}_engine_cpu_ratio"] = round(least_s[0] / least_s[1], 4)


async def _in_turns(
    bench: Bench, ways: dict[str, Way], found: dict[str, Any], said: dict[str, list[list[int]]]
) -> None:
    for number in range(1 + bench.options.rounds):
        for name in ways if number % 2 else reversed(ways):
            engine, asked = ways[name]
            before_s, began_s = session_cpu_s(engine.pid), time.monotonic()
            said[name] = (await bench.throughput(asked))["token_ids"]
            took_s = time.monotonic() - began_s
            if number:
                found[name]["tokens_per_s"].append(round(sum(map(len, said[name])) / took_s, 2))
                found[name]["engine_cpu_s"].append(round(session_cpu_s(engine.pid) - before_s, 2))
        found["load_average"].append(round(os.getloadavg()[0], 1))
        bench.save()


@contextlib.asynccontextmanager
async def _gateway(bench: Bench, main: EngineProcess) -> AsyncGenerator[EngineProcess]:
    """The gateway, as something that can be asked like an engine, with journal and actors behind it."""
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedServer(bench.work / "journal"))
        store = await open_store(server.url, durability="everysec")
        stack.push_async_callback(store.close)
        writer, _ = await take_over(store, ids.worker(_WORKER), "benchmark")
        at = (main.host, main.pid, main.pid_start_ticks, main.address)
        await writer.append(
            WorkerRegistered(main.incarnation, "main", *at, "benchmark"), WorkerReady(main.incarnation, 0)
        )
        detector = Detector(store, bench.host, host_name(), "detector")
        watching = asyncio.create_task(run_actor(store, detector, host_name(), "benchmark"))
        stack.push_async_callback(_ended, watching)
        command = [sys.executable, "-m", "belayer.cli", "gateway", "--url", server.url, "--worker", _WORKER]
        with (bench.logs / "gateway.log").open("ab") as log:
            gateway = await asyncio.create_subprocess_exec(
                *(*command, "--adopts-kv", "--durability", "everysec"),
                cwd=ROOT, env=bench.environment(), stdout=asyncio.subprocess.PIPE, stderr=log,
            )  # fmt: skip
        stack.push_async_callback(gateway.wait)
        stack.callback(_end, gateway)
        assert gateway.stdout is not None
        said = (await gateway.stdout.readline()).decode().split()
        if said[:1] != ["ready"]:
            raise RuntimeError(f"the gateway did not start; see gateway.log: {' '.join(said)[:_SHOWN]}")
        yield EngineProcess("gateway", main.host, gateway.pid, 0, said[1])


def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
