"""Latency under an offered load, which waits for no answer: ours, raw XADD's, and what the machine adds itself."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator, Sequence

import redis

from belayer.journal.durability import Durability
from belayer.journal.server import Server
from belayer.journal.writer import StreamWriter
from benchmarks.journal_loads import RAW_PIPELINE, Chunks, Measured, filled


def due_times(per_s: float, seconds: float, seed: int) -> Iterator[float]:
    """When chunks become due, in seconds from the beginning: a Poisson process."""
    rng = random.Random(seed)
    due = 0.0
    while (due := due + rng.expovariate(per_s)) < seconds:
        yield due


async def offered(writers: Sequence[StreamWriter], chunks: Chunks, per_s: float, seconds: float, seed: int) -> Measured:
    """Chunks become due, each on the trajectory whose turn it is.

    An append that is late because the one before it was is late from its own due time.
    """
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    turn = 0
    locks = [asyncio.Lock() for _ in writers]

    async def append(turn: int, due: float) -> None:
        which = turn % len(writers)
        async with locks[which]:
            await writers[which].append(chunks.event(turn // len(writers)))
        latencies.append(loop.time() - due)

    begun, cpu = loop.time(), time.process_time()
    async with asyncio.TaskGroup() as tasks:  # keeps only those that run: a list of all would slow the collector down
        for due_s in due_times(per_s, seconds, seed):
            due = begun + due_s
            wait_s = due - loop.time()
            if wait_s > 0 or turn % 16 == 0:
                await asyncio.sleep(max(0.0, wait_s))
            tasks.create_task(append(turn, due))
            turn += 1
    return Measured(turn, loop.time() - begun, time.process_time() - cpu, latencies)


def raw_offered(
    url: str, bodies: Sequence[bytes], streams: int, per_s: float, seconds: float, seed: int, prefix: str
) -> Measured:
    """The same load for redis-py with hiredis, blocking: whatever is due goes into one pipeline, of up to 256."""
    client = redis.Redis(unix_socket_path=url.removeprefix("unix://"))
    latencies: list[float] = []
    dues = list(due_times(per_s, seconds, seed))
    begun, cpu, sent = time.perf_counter(), time.process_time(), 0
    while sent < len(dues):
        now = time.perf_counter() - begun
        batch = 0
        while batch < RAW_PIPELINE and sent + batch < len(dues) and dues[sent + batch] <= now:
            batch += 1
        if not batch:
            time.sleep(dues[sent] - now)
            continue
        pipeline = client.pipeline(transaction=False)
        filled(pipeline, bodies, streams, sent, batch, Durability.EVERYSEC, prefix).execute()
        done = time.perf_counter() - begun
        latencies += [done - due for due in dues[sent : sent + batch]]
        sent += batch
    measured = Measured(sent, time.perf_counter() - begun, time.process_time() - cpu, latencies)
    client.close()
    return measured


async def pings(server: Server, every_s: float) -> list[float]:
    """Round trips of PING at a steady pace until cancelled: what the machine itself adds at this time, in seconds."""
    loop = asyncio.get_running_loop()
    took: list[float] = []
    due = loop.time()
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            due += every_s
            await asyncio.sleep(due - loop.time())
            await server.ask("PING")
            took.append(loop.time() - due)
    return took
