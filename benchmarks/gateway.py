"""What the gateway adds to each token: `python -m benchmarks.gateway [--streams 10000] [--quick]`.

An engine process (the recorded engine, whose logprobs carry the time at which each token was said), a Redis of our own
in mode everysec, `belayer gateway` as a process, and callers in this process, all on one machine. Each load runs once
against the engine itself and once through the gateway; a token's latency is the time from the engine's saying it to
the caller's having it, by one clock. `added` is the difference of the two runs' quantiles. Two loads: very many open
streams that speak slowly, and fewer that speak fast. As many streams as open files allow: a stream through a gateway
takes two of the gateway's. The last line is one JSON object; all figures go to benchmarks/results/gateway.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from belayer import ids
from belayer.gpu.recorded_engine import RecordedEngine
from belayer.gpu.recorded_prefix import ASSISTANT, END, USER, Position, TokenRecording
from belayer.journal.connect import open_store
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.events import WorkerReady, WorkerRegistered
from belayer.journal.writer import take_over
from belayer.processes import exit_with_owner, host_name, start_ticks

RESULTS = Path(__file__).with_name("results") / "gateway.json"
PROMPT = [USER, 1, END, ASSISTANT]
OPENING = 256
"""Requests that are opened at once."""
READY_S = 60.0
OPEN_S = 400.0
TOKENS = 2_000
"""More than any stream comes to."""


@dataclass(frozen=True)
class Load:
    """So many streams at so many tokens a second each, measured for so long once all are open."""

    name: str
    streams: int
    tokens_per_s: float
    seconds: float


class ClockEngine(RecordedEngine):
    """Says the time where a model says a logprob: seconds since `BEGUN`, so that f32 keeps 10 us."""

    def _event(
        self, position: Position, rest: Any, start: int, stop: int, request_id: str, prompt_tokens: int
    ) -> dict[str, Any]:
        event = super()._event(position, rest, start, stop, request_id, prompt_tokens)
        now = time.monotonic() - float(os.environ["BEGUN"])
        event["meta_info"]["output_token_logprobs"] = [[now, token, None] for token in event["output_ids"]]
        return event


async def serve_engine(tokens_per_s: float) -> None:
    """The engine process; ends with its parent."""
    exit_with_owner(os.getppid())
    recording = TokenRecording("clock", PROMPT, [[*([272] * TOKENS), END]])
    runner = web.AppRunner(ClockEngine([recording], tokens_per_s, "clock", False).application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


class Info(msgspec.Struct):
    output_token_logprobs: list[tuple[float, int, None]]


class Event(msgspec.Struct):
    meta_info: Info


@dataclass
class Callers:
    """All streams of one run, and what they saw while all of them were open."""

    address: str
    load: Load
    begun: float
    latencies: array[float] = field(default_factory=lambda: array("d"))
    first_s: list[float] = field(default_factory=list[float])
    opening_s: float = 0.0
    open: int = 0
    failed: int = 0
    measuring: bool = False

    async def run(self, pid: int) -> tuple[float, float]:
        """Open all streams, measure for a while, leave. Processor seconds meanwhile and MB at the end, of a process."""
        self._gate = asyncio.Semaphore(OPENING)
        self._all_open = asyncio.Event()
        self._decode = msgspec.json.Decoder(Event).decode
        started = time.monotonic()
        tasks = [asyncio.create_task(self._stream(number)) for number in range(self.load.streams)]
        try:
            await asyncio.wait_for(self._all_open.wait(), OPEN_S)
            self.opening_s = time.monotonic() - started
            before_s, _ = used(pid)
            self.measuring = True
            await asyncio.sleep(self.load.seconds)
            self.measuring = False
            after_s, memory_mb = used(pid)
            return after_s - before_s, memory_mb
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, number: int) -> None:
        host, _, port = self.address.removeprefix("http://").rpartition(":")
        sampling = {"max_new_tokens": TOKENS, "temperature": 0.0}
        body = {"input_ids": PROMPT, "rid": f"r{number}", "sampling_params": sampling}
        content = json.dumps({**body, "return_logprob": True, "stream": True}).encode()
        async with self._gate:
            asked = time.monotonic()
            reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 18)
            head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
            writer.write(head.encode() + content)
            await reader.readuntil(b"\r\n\r\n")
        self.first_s.append(time.monotonic() - asked)
        self.open += 1
        if self.open == self.load.streams:
            self._all_open.set()
        try:
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    said = self._decode(line[6:]).meta_info.output_token_logprobs
                    now = time.monotonic()
                    if self.measuring:
                        self.latencies.extend(now - self.begun - entry[0] for entry in said)
            self.failed += 1  # no stream ends by itself here
        finally:
            writer.close()


def used(pid: int) -> tuple[float, float]:
    """Processor seconds and resident MB of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    memory = Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(memory) / 1024


def spawned(words: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables})


@asynccontextmanager
async def process(*words: str, **variables: str) -> AsyncIterator[tuple[subprocess.Popen[str], str]]:
    """A child of ours and the first line that it says; killed at the end."""
    child = spawned(words, variables)
    try:
        assert child.stdout is not None
        yield child, await asyncio.wait_for(asyncio.to_thread(child.stdout.readline), READY_S)
    finally:
        child.kill()
        child.wait()


def quantiles(values: Any) -> dict[str, float]:
    ordered = sorted(values)
    return {name: round(1000 * ordered[int(len(ordered) * q)], 2) for name, q in (("p50", 0.5), ("p99", 0.99))}


async def measure(load: Load, begun: float, folder: Path) -> dict[str, Any]:
    """One load, first at the engine, then through a gateway."""
    async with AsyncExitStack() as stack:
        engine_words = [
            sys.executable,
            "-m",
            "benchmarks.gateway",
            "--engine",
            str(load.tokens_per_s),
        ]
        engine, port = await stack.enter_async_context(process(*engine_words, BEGUN=str(begun)))
        address = f"http://127.0.0.1:{port.strip()}"
        direct = Callers(address, load, begun)
        await direct.run(engine.pid)
        server = await stack.enter_async_context(EmbeddedServer(folder / load.name))
        await register(server.url, engine.pid, address)
        words = [sys.executable, "-m", "belayer.cli", "gateway", "--worker", "w", "--url", server.url]
        gateway, ready = await stack.enter_async_context(process(*words))
        _, idle_mb = used(gateway.pid)
        through = Callers(ready.split()[1], load, begun)
        spent_s, memory_mb = await through.run(gateway.pid)
        appends = await entries(server.url)
    found = {"direct": quantiles(direct.latencies), "gateway": quantiles(through.latencies)}
    return {
        "streams": load.streams,
        "tokens_per_s": round(len(through.latencies) / load.seconds),
        "token_latency_ms": found,
        "added_ms": {q: round(found["gateway"][q] - found["direct"][q], 2) for q in ("p50", "p99")},
        "headers_ms": {"direct": quantiles(direct.first_s), "gateway": quantiles(through.first_s)},
        "opening_s": {"direct": round(direct.opening_s, 1), "gateway": round(through.opening_s, 1)},
        "measured_tokens": [len(direct.latencies), len(through.latencies)],
        "gateway_mb": {"idle": round(idle_mb), "all open": round(memory_mb)},
        "gateway_kb_a_stream": round(1024 * (memory_mb - idle_mb) / load.streams, 1),
        "gateway_cpu_share": round(spent_s / load.seconds, 2),
        "gateway_cpu_us_a_token": round(1e6 * spent_s / len(through.latencies)),
        "failed": direct.failed + through.failed,
        "entries_a_trajectory": appends,
    }


async def register(url: str, pid: int, address: str) -> None:
    """Say in the journal that the engine is a worker's ready main."""
    store = await open_store(url)
    writer, _ = await take_over(store, ids.worker("w"), "benchmark")
    registered = WorkerRegistered("clock", "main", host_name(), pid, start_ticks(pid), address, "run")
    await writer.append(registered, WorkerReady("clock", 0))
    await store.close()


async def entries(url: str) -> int:
    """How many entries a trajectory has in the journal, on average over some of them."""
    store = await open_store(url)
    streams = await store.streams(ids.StreamKind.TRAJECTORY)
    counts = [len(await store.read(stream, limit=100_000)) for stream in streams[:50]]
    await store.close()
    return round(statistics.mean(counts))


async def main(streams: int, quick: bool) -> int:
    begun = time.monotonic()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(streams, (hard - 200) // 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * most + 200)), hard))
    loads = [Load("many", most, 0.1, 20.0), Load("busy", 64, 30.0, 10.0)]
    if quick:
        loads = [Load("many", min(most, 500), 0.5, 6.0), Load("busy", 16, 30.0, 4.0)]
    machine = {"kernel": platform.release(), "cpus": os.cpu_count(), "python": platform.python_version()}
    results: dict[str, Any] = {"machine": machine, "load_average_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="belayer-gateway-") as folder:
        for load in loads:
            results[load.name] = await measure(load, begun, Path(folder))
            print(f"{load.name}: {results[load.name]}", flush=True)
    if not quick:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    many, busy = results["many"], results["busy"]
    summary = {
        "open_streams": many["streams"],
        "gateway_kb_a_stream": many["gateway_kb_a_stream"],
        "added_p50_ms": busy["added_ms"]["p50"],
        "added_p99_ms": busy["added_ms"]["p99"],
        "added_p50_ms_many": many["added_ms"]["p50"],
        "added_p99_ms_many": many["added_ms"]["p99"],
        "cpu_us_a_token": busy["gateway_cpu_us_a_token"],
        "failed": many["failed"] + busy["failed"],
    }
    print(json.dumps(summary))
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--engine", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        asyncio.run(serve_engine(options.engine))
    sys.exit(asyncio.run(main(options.streams, options.quick)))
