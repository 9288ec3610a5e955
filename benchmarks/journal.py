"""How fast the journal is: `python -m benchmarks.journal [--json] [--quick] [--mode MODE]`.

For each durability mode, number of trajectories and chunk size: appends through `StreamWriter` (encoding, digest, ids,
batching and acknowledgement included) against raw pipelined XADD of the very same bytes with redis-py and hiredis. Both
run in turn on one server, several rounds; the ratio is the median over rounds of ours / raw, so that noise of the
machine hits both. Then latency under an offered load that does not wait for answers. After every run the journal is
read back: every chain whole, every acknowledged chunk there once. The last line is one JSON object; all figures go to
benchmarks/results/journal.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import platform
import shutil
import socket
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from belayer.blocking import new_event_loop
from belayer.journal.connect import open_store
from belayer.journal.durability import Durability
from belayer.journal.embedded import EmbeddedServer, shipped_server
from belayer.journal.route import parse_routes
from belayer.journal.server import Server
from belayer.journal.server_checks import parse_info
from benchmarks.journal_loads import (
    Chunks,
    Measured,
    bodies_of,
    closed_loop,
    lost_and_doubled,
    quantile,
    raw_xadd,
    raw_xadd_asyncio,
    redis_benchmark,
    rollouts,
    take_over_all,
)
from benchmarks.journal_offered import offered, pings, raw_offered
from benchmarks.journal_parts import forms, parts
from benchmarks.journal_reading import LENGTHS, resume

RESULTS = Path(__file__).with_name("results") / "journal.json"
TRAJECTORIES = (1, 64, 4096)
CHUNK_TOKENS = (32, 256)
OFFERED = ((2_000, 256), (20_000, 32))
OFFERED_TRAJECTORIES = 1024


@asynccontextmanager
async def fresh_server(durability: Durability) -> AsyncIterator[EmbeddedServer]:
    """A server that keeps the mode, on its own folder; its file is not rewritten while we measure."""
    settings = {"auto-aof-rewrite-percentage": "0"}
    executable, port = None, None
    match durability:
        case Durability.MEMORY:
            settings["appendonly"] = "no"
        case Durability.EVERYSEC:
            pass
        case Durability.FSYNC:
            settings["appendfsync"], executable = "always", shipped_server()
        case Durability.REPLICATED:
            port = free_port()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="belayer-benchmark-")))
        server = EmbeddedServer(folder / "a", settings=settings, executable=executable, port=port)
        await stack.enter_async_context(server)
        if port is not None:
            replica = await stack.enter_async_context(EmbeddedServer(folder / "b", settings=settings))
            await ask(replica.url, "REPLICAOF", "127.0.0.1", str(port))
            await until_replicated(server.url)
        yield server


async def ask(url: str, *command: str) -> Any:
    server = Server(parse_routes(url).of(b""), 30.0)
    try:
        return await server.ask(*command)
    finally:
        server.close()


async def until_replicated(url: str) -> None:
    """Return once the replica follows; WAIT blocks until it does."""
    server = Server(parse_routes(url).of(b""), 30.0)
    try:
        while await server.ask("WAIT", "1", "1000", block_s=1.0) != 1:
            await server.ask("SET", "belayer-benchmark", "1")
    finally:
        server.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Tally:
    """What was acknowledged and is not there, or there twice, over the whole benchmark."""

    def __init__(self) -> None:
        self.lost = 0
        self.doubled = 0
        self.checked = 0

    def add(self, found: tuple[int, int], chunks: int) -> None:
        self.lost += found[0]
        self.doubled += found[1]
        self.checked += chunks


def merged(runs: list[Measured]) -> Measured:
    return Measured(
        sum(run.chunks for run in runs),
        sum(run.wall_s for run in runs),
        sum(run.cpu_s for run in runs),
        [latency for run in runs for latency in run.latencies_s],
    )


async def compare(durability: Durability, trajectories: int, tokens: int, total: int, rounds: int, tally: Tally) -> Any:
    """One row: our appends and raw XADD in turn."""
    chunks = Chunks(tokens)
    ours: list[Measured] = []
    raw: list[Measured] = []
    raw_asyncio: list[Measured] = []
    memory: list[float] = []
    chunk_bytes = 0
    async with fresh_server(durability) as server:
        store = await open_store(server.url, durability=durability)
        for number in range(rounds):
            names = [f"r{number}-{trajectory}" for trajectory in range(trajectories)]
            writers = await take_over_all(store, names)
            before = int(parse_info(await ask(server.url, "INFO", "memory"))["used_memory"])
            ours.append(await closed_loop(writers, chunks, total))
            after = int(parse_info(await ask(server.url, "INFO", "memory"))["used_memory"])
            memory.append((after - before) / (total * tokens))
            bodies = bodies_of(await store.read(writers[0].stream, 1))
            chunk_bytes = len(bodies[0])
            tally.add(await lost_and_doubled(store, writers, total), total)
            await ask(server.url, "FLUSHALL", "SYNC")
            plain = (server.url, bodies, trajectories, total, durability)
            raw.append(await asyncio.to_thread(raw_xadd, *plain, f"raw{number}"))
            await ask(server.url, "FLUSHALL", "SYNC")
            raw_asyncio.append(await raw_xadd_asyncio(*plain, f"raw-asyncio{number}"))
            await ask(server.url, "FLUSHALL", "SYNC")
        await store.close()
    ratios = [one.rate / other.rate for one, other in zip(ours, raw, strict=True)]
    to_asyncio = [one.rate / other.rate for one, other in zip(ours, raw_asyncio, strict=True)]
    return {
        "mode": str(durability),
        "trajectories": trajectories,
        "chunk_tokens": tokens,
        "chunk_bytes": chunk_bytes,
        "ours": merged(ours).figures(),
        "raw": merged(raw).figures(),
        "raw_asyncio": merged(raw_asyncio).figures(),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratio_to_asyncio": round(statistics.median(to_asyncio), 3),
        "redis_bytes_per_token": round(statistics.median(memory), 2),
    }


async def offer(per_s: int, tokens: int, seconds: float, rounds: int, tally: Tally) -> Any:
    """One row: latency under an offered load in mode everysec, ours and raw XADD's in turn on the same server.

    The round with the median p99 of ours counts.
    """
    runs: list[tuple[Measured, Measured, dict[str, Any]]] = []
    for seed in range(rounds):
        async with fresh_server(Durability.EVERYSEC) as server:
            store = await open_store(server.url)
            writers = await take_over_all(store, [f"t{number}" for number in range(OFFERED_TRAJECTORIES)])
            await closed_loop(writers, Chunks(tokens), len(writers))
            pinging = asyncio.create_task(pings(pinged := Server(parse_routes(server.url).of(b""), 30.0), 0.005))
            run = await offered(writers, Chunks(tokens), per_s, seconds, seed)
            pinging.cancel()
            floor = quantile(await pinging, 0.99) * 1e3
            pinged.close()
            tally.add(await lost_and_doubled(store, writers, run.chunks + len(writers)), run.chunks)
            bodies = bodies_of(await store.read(writers[0].stream, 1))
            await store.close()
            plain = (server.url, bodies, OFFERED_TRAJECTORIES, per_s, seconds, seed, "raw")
            raw = await asyncio.to_thread(raw_offered, *plain)
            delayed = parse_info(await ask(server.url, "INFO", "persistence"))["aof_delayed_fsync"]
            runs.append((run, raw, {"ping_p99_ms": round(floor, 3), "aof_delayed_fsync": int(delayed)}))
    runs.sort(key=lambda each: each[0].latency_ms(0.99))
    ours, raw, seen = runs[len(runs) // 2]
    return {
        "offered_per_s": per_s,
        "chunk_tokens": tokens,
        "trajectories": OFFERED_TRAJECTORIES,
        **ours.figures(),
        **seen,
        "raw": raw.figures(),
        "p99_ms_of_rounds": [round(each.latency_ms(0.99), 3) for each, _, _ in runs],
        "raw_p99_ms_of_rounds": [round(each.latency_ms(0.99), 3) for _, each, _ in runs],
    }


async def through_the_client(total: int, rounds: int, tally: Tally) -> tuple[Any, list[Any]]:
    """What `belayer.client.Trajectory` costs a chunk of 256, fed 16 tokens at a time, and a resume by length."""
    async with fresh_server(Durability.EVERYSEC) as server:
        store = await open_store(server.url)
        names = [str(number) for number in range(64)]
        runs = [await rollouts(store, names, 256, total, f"r{number}") for number in range(rounds)]
        tally.checked += sum(run.chunks for run in runs)
        best = min(runs, key=lambda run: run.cpu_s)
        rollout = {
            "chunks_per_s": round(best.rate),
            "client_cpu_us_per_chunk": round(best.cpu_s / best.chunks * 1e6, 1),
            "client_cpu_us_per_token": round(best.cpu_s / best.chunks / 256 * 1e6, 3),
        }
        print(f"rollout client, 64 trajectories, 16 tokens a call: {rollout}")
        resumes: list[Any] = []
        for length in LENGTHS:
            resumes.append(await resume(store, length))
            print(f"resume: {resumes[-1]}", flush=True)
        await store.close()
    return rollout, resumes


def total_of(trajectories: int, quick: bool, durability: Durability) -> int:
    """Chunks in one measurement: enough to be steady, little enough to fit in memory."""
    alone = 1_000 if durability is Durability.FSYNC else 4_000
    total = alone if trajectories == 1 else 16 * max(trajectories, 2_048)
    return total // 4 if quick else total


async def measure(modes: list[Durability], quick: bool, rounds: int) -> dict[str, Any]:
    tally = Tally()
    rows: list[Any] = []
    for durability in modes:
        for trajectories in TRAJECTORIES:
            for tokens in CHUNK_TOKENS:
                total = total_of(trajectories, quick, durability)
                row = await compare(durability, trajectories, tokens, total, rounds, tally)
                rows.append(row)
                show(row)
    loads = [await offer(per_s, tokens, 3.0 if quick else 10.0, min(3, rounds), tally) for per_s, tokens in OFFERED]
    for load in loads:
        print(
            f"offered {load['offered_per_s']:>6}/s of {load['chunk_tokens']:>3} tokens, everysec: "
            f"p50 {load['p50_ms']:.2f} ms, p99 {load['p99_ms']:.2f} ms, worst {load['worst_ms']:.1f} ms; "
            f"PING p99 at the same time {load['ping_p99_ms']:.2f} ms; "
            f"raw XADD p99 {load['raw']['p99_ms']:.2f} ms, worst {load['raw']['worst_ms']:.1f} ms"
        )
    rollout, resumes = await through_the_client(1_024 if quick else 8_192, rounds, tally)
    new_loop = type(asyncio.get_running_loop())
    where = {str(tokens): await asyncio.to_thread(parts, tokens, new_loop) for tokens in CHUNK_TOKENS}
    print(f"parts of an append, us: {where}")
    print(f"forms of token columns: {(columns := forms(256))}")
    plain: dict[str, float] = {}
    if (executable := shutil.which("redis-benchmark")) is not None:
        async with fresh_server(Durability.EVERYSEC) as server:
            for row in (row for row in rows[:2] if row["trajectories"] == 1):
                total = 10_000 if quick else 100_000
                rate = await asyncio.to_thread(redis_benchmark, executable, server.url, row["chunk_bytes"], total)
                plain[f"{row['chunk_bytes']} bytes"] = round(rate)
        print(f"redis-benchmark -P 64, everysec, XADD/s: {plain}")
    return {
        "machine": machine(),
        "rows": rows,
        "offered": loads,
        "redis_benchmark_xadd_per_s": plain,
        "rollout_client": rollout,
        "resume": resumes,
        "parts_us": where,
        "token_forms": columns,
        "summary": summary(rows, loads, tally),
    }


def show(row: Any) -> None:
    ours, raw = row["ours"], row["raw"]
    print(
        f"{row['mode']:>10} {row['trajectories']:>5} x {row['chunk_tokens']:>3}: "
        f"{ours['chunks_per_s']:>6}/s (raw {raw['chunks_per_s']:>6}/s, ratio {row['ratio']:.2f}; "
        f"asyncio {row['ratio_to_asyncio']:.2f}), "
        f"p50 {ours['p50_ms']:.2f} p99 {ours['p99_ms']:.2f} worst {ours['worst_ms']:.1f} ms, "
        f"{ours['client_cpu_us_per_chunk']:.0f} us CPU, {row['redis_bytes_per_token']:.1f} B/token",
        flush=True,
    )


def summary(rows: list[Any], loads: list[Any], tally: Tally) -> dict[str, Any]:
    """The last line. `append_ratio`: many trajectories, 2 KB chunks, mode everysec (or the mode asked for)."""
    wanted = [row for row in rows if row["chunk_tokens"] == 256 and row["trajectories"] > 1]
    headline = [row for row in wanted if row["mode"] == "everysec"] or wanted
    small = [row for row in rows if row["chunk_tokens"] == 32 and row["trajectories"] > 1]
    return {
        "append_ratio": min(row["ratio"] for row in headline),
        "append_ratio_to_asyncio": min(row["ratio_to_asyncio"] for row in headline),
        "p99_ms_2000_chunks_s_everysec": loads[0]["p99_ms"],
        "ping_p99_ms_meanwhile": loads[0]["ping_p99_ms"],
        "p99_ms_20000_chunks_s_everysec": loads[1]["p99_ms"],
        "raw_p99_ms_20000_chunks_s_everysec": loads[1]["raw"]["p99_ms"],
        "chunks_per_s_256_tokens": min(row["ours"]["chunks_per_s"] for row in headline),
        "chunks_per_s_32_tokens": min(
            row["ours"]["chunks_per_s"] for row in small if row["mode"] == headline[0]["mode"]
        ),
        "client_cpu_us_per_chunk": max(row["ours"]["client_cpu_us_per_chunk"] for row in headline),
        "raw_cpu_us_per_chunk": max(row["raw"]["client_cpu_us_per_chunk"] for row in headline),
        "redis_mb_per_million_tokens": headline[0]["redis_bytes_per_token"],
        "lost": tally.lost,
        "doubled": tally.doubled,
        "checked": tally.checked,
    }


def machine() -> dict[str, Any]:
    return {
        "processors": os.cpu_count(),
        "processor": next(
            (
                line.split(":")[1].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if "model name" in line
            ),
            platform.machine(),
        ),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "event_loop": type(asyncio.get_running_loop()).__module__,
        "load_before": [round(load, 2) for load in os.getloadavg()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the journal against raw pipelined XADD.")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--quick", action="store_true", help="a quarter of the load, two rounds, mode everysec only")
    parser.add_argument("--mode", choices=[str(mode) for mode in Durability], help="only this durability mode")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop", help="uvloop if it is installed")
    options = parser.parse_args()
    modes = [Durability(options.mode)] if options.mode else [Durability.EVERYSEC] if options.quick else list(Durability)
    with contextlib.redirect_stdout(io.StringIO()) if options.json else contextlib.nullcontext():
        loop_factory = asyncio.new_event_loop if options.loop == "asyncio" else new_event_loop
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            results = runner.run(measure(modes, options.quick, 2 if options.quick else options.rounds))
    if not options.quick and not options.mode:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results["summary"]))


if __name__ == "__main__":
    main()
