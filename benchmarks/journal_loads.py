"""The loads that `benchmarks.journal` measures: the journal's own appends and raw pipelined XADD of the same bytes."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio

from belayer import ids
from belayer.client import Trajectory
from belayer.journal.codec import Entry
from belayer.journal.durability import Durability
from belayer.journal.events import TokensAppended
from belayer.journal.redis_store import RedisStore
from belayer.journal.writer import Reader, StreamWriter, take_over

RAW_PIPELINE = 256


@dataclass
class Measured:
    """One measurement. Latencies: one an append, from the call (or its due time) to the acknowledgement."""

    chunks: int
    wall_s: float
    cpu_s: float
    latencies_s: list[float]

    @property
    def rate(self) -> float:
        return self.chunks / self.wall_s

    def latency_ms(self, share: float) -> float:
        """The latency that this share of the appends did not exceed."""
        return quantile(self.latencies_s, share) * 1e3

    def figures(self) -> dict[str, float]:
        return {
            "chunks_per_s": round(self.rate),
            "p50_ms": round(self.latency_ms(0.5), 3),
            "p99_ms": round(self.latency_ms(0.99), 3),
            "worst_ms": round(max(self.latencies_s) * 1e3, 3),
            "client_cpu_us_per_chunk": round(self.cpu_s / self.chunks * 1e6, 1),
        }


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Chunks:
    """Token chunks of one size, of random tokens and logprobs, so that nothing compresses."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._columns = [(os.urandom(4 * tokens), os.urandom(4 * tokens)) for _ in range(64)]
        self._loss_mask = b"\x01" * tokens

    def event(self, number: int, generation: int = 1) -> TokensAppended:
        token_ids, logprobs = self._columns[number % 64]
        return TokensAppended(generation, number * self.tokens, self.tokens, token_ids, logprobs, self._loss_mask, 0)


async def take_over_all(store: RedisStore, names: Sequence[str]) -> list[StreamWriter]:
    """A writer for each trajectory."""
    taken = await asyncio.gather(*(take_over(store, ids.trajectory(name), "benchmark") for name in names))
    return [writer for writer, _ in taken]


async def closed_loop(writers: Sequence[StreamWriter], chunks: Chunks, total: int) -> Measured:
    """Every trajectory appends its next chunk as soon as the last one is acknowledged; `total` chunks in all.

    Chunks and tasks are there before the clock starts, as the bodies of raw XADD are: they are the rollout's cost.
    """
    latencies: list[float] = []
    clock = time.perf_counter
    share, more = divmod(total, len(writers))
    events = [chunks.event(number) for number in range(share + 1)]
    start = asyncio.Event()

    async def work(writer: StreamWriter, mine: Sequence[TokensAppended]) -> None:
        await start.wait()
        for event in mine:
            begun = clock()
            await writer.append(event)
            latencies.append(clock() - begun)

    async with asyncio.TaskGroup() as tasks:
        for number, writer in enumerate(writers):
            tasks.create_task(work(writer, events[: share + (number < more)]))
        await asyncio.sleep(0)
        gc.collect()
        begun, cpu = clock(), time.process_time()
        start.set()
    return Measured(total, clock() - begun, time.process_time() - cpu, latencies)


async def rollouts(store: RedisStore, names: Sequence[str], tokens: int, total: int, prefix: str) -> Measured:
    """The rollout client itself: tokens and logprobs as lists, 16 at a time as an engine streams them, `total` chunks.

    A latency here is that of one call of `append_tokens`, most of which only gather.
    """
    token_ids, logprobs = list(range(16)), [-0.25] * 16
    latencies: list[float] = []
    opened = [await Trajectory.open(store, f"{prefix}-{name}", chunk_tokens=tokens, chunk_s=60.0) for name in names]
    for trajectory in opened:
        await trajectory.start("run", "task", [1])
        await trajectory.begin_generation()

    async def work(trajectory: Trajectory, count: int) -> None:
        for _ in range(count * tokens // 16):
            begun = time.perf_counter()
            await trajectory.append_tokens(token_ids, logprobs)
            latencies.append(time.perf_counter() - begun)

    share = total // len(names)
    begun, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work(trajectory, share) for trajectory in opened))
    measured = Measured(share * len(names), time.perf_counter() - begun, time.process_time() - cpu, latencies)
    for trajectory in opened:
        await trajectory.close()
    return measured


async def lost_and_doubled(store: RedisStore, writers: Sequence[StreamWriter], acknowledged: int) -> tuple[int, int]:
    """How many acknowledged chunks are not in the journal, and how many are there twice. Checks every chain."""
    found: list[bytes] = []
    for writer in writers:
        events = await Reader(store, writer.stream).catch_up()
        found += [recorded.event_id for recorded in events if isinstance(recorded.event, TokensAppended)]
    distinct = len(set(found))
    return max(0, acknowledged - distinct), len(found) - distinct


async def raw_xadd_asyncio(
    url: str, bodies: Sequence[bytes], streams: int, total: int, durability: Durability, prefix: str
) -> Measured:
    """The same with redis-py's asyncio client, which is what asynchronous rollout code would use instead of us."""
    client = redis.asyncio.Redis(unix_socket_path=url.removeprefix("unix://"))
    latencies: list[float] = []
    begun, cpu, sent = time.perf_counter(), time.process_time(), 0
    while sent < total:
        started = time.perf_counter()
        batch = min(streams, RAW_PIPELINE, total - sent)
        await filled(client.pipeline(transaction=False), bodies, streams, sent, batch, durability, prefix).execute()
        latencies += [time.perf_counter() - started] * batch
        sent += batch
    measured = Measured(total, time.perf_counter() - begun, time.process_time() - cpu, latencies)
    await client.aclose()
    return measured


def filled(
    pipeline: Any, bodies: Sequence[bytes], streams: int, sent: int, batch: int, durability: Durability, prefix: str
) -> Any:
    """The pipeline with the next `batch` XADDs in it, and the mode's confirmation."""
    for at in range(sent, sent + batch):
        pipeline.xadd(f"{prefix}-{at % streams}", {"e": bodies[at % len(bodies)]}, id=f"1-{at // streams + 1}")
    if durability is Durability.FSYNC:
        pipeline.execute_command("WAITAOF", 1, 0, 0)
    elif durability is Durability.REPLICATED:
        pipeline.execute_command("WAIT", 1, 0)
    return pipeline


def raw_xadd(
    url: str, bodies: Sequence[bytes], streams: int, total: int, durability: Durability, prefix: str
) -> Measured:
    """redis-py with hiredis, blocking (its fastest form): pipelines of explicit ids, confirmed as the mode says."""
    client = redis.Redis(unix_socket_path=url.removeprefix("unix://"))
    latencies: list[float] = []
    begun, cpu, sent = time.perf_counter(), time.process_time(), 0
    while sent < total:
        started = time.perf_counter()
        batch = min(streams, RAW_PIPELINE, total - sent)
        filled(client.pipeline(transaction=False), bodies, streams, sent, batch, durability, prefix).execute()
        latencies += [time.perf_counter() - started] * batch
        sent += batch
    measured = Measured(total, time.perf_counter() - begun, time.process_time() - cpu, latencies)
    client.close()
    return measured


def redis_benchmark(executable: str, url: str, body_bytes: int, total: int) -> float:
    """XADD/s of redis-benchmark, pipelined by 64 on one connection."""
    command = [executable, "-s", url.removeprefix("unix://"), "-c", "1", "-P", "64", "-n", str(total), "-q"]
    ran = subprocess.run(
        [*command, "XADD", "redis-benchmark", "*", "e", "x" * body_bytes], check=True, capture_output=True, text=True
    )
    return float(ran.stdout.split("requests per second")[0].split()[-1])


def bodies_of(entries: Sequence[Entry]) -> list[bytes]:
    return [entry.body for entry in entries]
