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
LOAD_S = 300.0


@dataclass(frozen=True)
class Load:
    """So many streams of so many tokens at so many tokens a second each."""

    name: str
    streams: int
    tokens: int
    tokens_per_s: float


class ClockEngine(RecordedEngine):
    """Says the time where a model says a logprob: seconds since `BEGUN`, so that f32 keeps 10 us."""

    def _event(self, position: Position, rest: Any, start: int, stop: int, *known: Any) -> dict[str, Any]:
        event = super()._event(position, rest, start, stop, *known)
        now = time.monotonic() - float(os.environ["BEGUN"])
        event["meta_info"]["output_token_logprobs"] = [[now, token, None] for token in event["output_ids"]]
        return event


async def serve_engine(tokens: int, tokens_per_s: float) -> None:
    """The engine process; ends with its parent."""
    exit_with_owner(os.getppid())
    recording = TokenRecording("clock", PROMPT, [[*([272] * tokens), END]])
    runner = web.AppRunner(ClockEngine([recording], tokens_per_s, "clock", False).application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


class Info(msgspec.Struct):
    output_token_logprobs: list[tuple[float, int, None]]
    finish_reason: dict[str, Any] | None


class Event(msgspec.Struct):
    meta_info: Info


@dataclass
class Callers:
    """All streams of one run, and what they saw."""

    address: str
    load: Load
    begun: float
    latencies: array[float] = field(default_factory=lambda: array("d"))
    first_s: list[float] = field(default_factory=list[float])
    open: int = 0
    most_open: int = 0
    tokens: int = 0
    failed: int = 0

    async def run(self) -> None:
        """Open all streams, a few at once; count tokens once they are all open."""
        self._gate = asyncio.Semaphore(OPENING)
        self._decode = msgspec.json.Decoder(Event).decode
        async with asyncio.timeout(LOAD_S):
            await asyncio.gather(*(self._stream(number) for number in range(self.load.streams)))

    async def _stream(self, number: int) -> None:
        host, _, port = self.address.removeprefix("http://").rpartition(":")
        sampling = {"max_new_tokens": self.load.tokens, "temperature": 0.0}
        body = {"input_ids": PROMPT, "rid": f"r{number}", "sampling_params": sampling}
        content = json.dumps({**body, "return_logprob": True, "stream": True}).encode()
        async with self._gate:
            asked = time.monotonic()
            reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 18)
            head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
            writer.write(head.encode() + content)
            await reader.readuntil(b"\r\n\r\n")
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await self._read(reader, asked)
        finally:
            self.open -= 1
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, asked: float) -> None:
        seen = 0
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            try:
                event = self._decode(line[6:])
            except msgspec.DecodeError:
                break
            now = time.monotonic()
            if not seen:
                self.first_s.append(now - asked)
            said = event.meta_info.output_token_logprobs
            seen += len(said)
            if self.most_open == self.load.streams:
                self.latencies.extend(now - self.begun - entry[0] for entry in said)
            if event.meta_info.finish_reason is not None:
                break
        self.tokens += seen
        self.failed += seen != self.load.tokens


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
            str(load.tokens),
            str(load.tokens_per_s),
        ]
        engine, port = await stack.enter_async_context(process(*engine_words, BEGUN=str(begun)))
        address = f"http://127.0.0.1:{port.strip()}"
        direct = Callers(address, load, begun)
        await direct.run()
        server = await stack.enter_async_context(EmbeddedServer(folder / load.name))
        await register(server.url, engine.pid, address)
        words = [sys.executable, "-m", "belayer.cli.main", "gateway", "--worker", "w", "--url", server.url]
        gateway, ready = await stack.enter_async_context(process(*words))
        before_s, idle_mb = used(gateway.pid)
        through = Callers(ready.split()[1], load, begun)
        running = asyncio.create_task(through.run())
        most_mb = idle_mb
        while not running.done():
            most_mb = max(most_mb, used(gateway.pid)[1])
            await asyncio.wait([running], timeout=0.5)
        running.result()
        spent_s = used(gateway.pid)[0] - before_s
        audit = await chunks(server.url)
    found = {"direct": quantiles(direct.latencies), "gateway": quantiles(through.latencies)}
    return {
        "streams": load.streams,
        "tokens_per_s": round(load.streams * load.tokens_per_s),
        "most_open": through.most_open,
        "token_latency_ms": found,
        "added_ms": {q: round(found["gateway"][q] - found["direct"][q], 2) for q in ("p50", "p99")},
        "first_token_ms": {"direct": quantiles(direct.first_s), "gateway": quantiles(through.first_s)},
        "measured_tokens": [len(direct.latencies), len(through.latencies)],
        "gateway_mb": {"idle": round(idle_mb), "most": round(most_mb)},
        "gateway_kb_a_stream": round(1024 * (most_mb - idle_mb) / load.streams, 1),
        "gateway_cpu_us_a_token": round(1e6 * spent_s / through.tokens),
        "failed": direct.failed + through.failed,
        **audit,
    }


async def register(url: str, pid: int, address: str) -> None:
    """Say in the journal that the engine is a worker's ready main."""
    store = await open_store(url)
    writer, _ = await take_over(store, ids.worker("w"), "benchmark")
    registered = WorkerRegistered("clock", "main", host_name(), pid, start_ticks(pid), address, "run")
    await writer.append(registered, WorkerReady("clock", 0))
    await store.close()


async def chunks(url: str) -> dict[str, int]:
    """How many trajectories the journal has, and entries in some of them."""
    store = await open_store(url)
    streams = await store.streams(ids.StreamKind.TRAJECTORY)
    entries = [len(await store.read(stream)) for stream in streams[:50]]
    await store.close()
    return {"trajectories": len(streams), "entries_a_trajectory": round(statistics.mean(entries))}


async def main(streams: int, quick: bool) -> int:
    begun = time.monotonic()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(streams, (hard - 200) // 2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * most + 200)), hard))
    loads = [Load("many", most, 12, 0.2), Load("busy", 64, 600, 30.0)]
    if quick:
        loads = [Load("many", min(most, 500), 10, 1.0), Load("busy", 16, 150, 30.0)]
    machine = {"kernel": platform.release(), "cpus": os.cpu_count(), "python": platform.python_version()}
    results: dict[str, Any] = {"machine": machine, "load_before": os.getloadavg()}
    with tempfile.TemporaryDirectory(prefix="belayer-gateway-") as folder:
        for load in loads:
            results[load.name] = await measure(load, begun, Path(folder))
            print(f"{load.name}: {results[load.name]}", flush=True)
    if not quick:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    many, busy = results["many"], results["busy"]
    summary = {
        "open_streams": many["most_open"],
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
    parser.add_argument("--engine", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        asyncio.run(serve_engine(int(options.engine[0]), float(options.engine[1])))
    sys.exit(asyncio.run(main(options.streams, options.quick)))
