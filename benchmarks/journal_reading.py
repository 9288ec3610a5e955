"""What opening a trajectory again costs, against the length of its journal: read, check the chain, fold, take over."""

from __future__ import annotations

import statistics
import time
from typing import Any

from belayer import ids
from belayer.client import Trajectory
from belayer.journal.codec import Recorded
from belayer.journal.events import (
    ActionCommitted,
    ActionStarted,
    AnyEvent,
    GenerationFinished,
    GenerationStarted,
    TrajectoryStarted,
)
from belayer.journal.redis_store import RedisStore
from belayer.journal.writer import Reader, take_over
from belayer.projections.trajectory import fold
from benchmarks.journal_loads import Chunks

LENGTHS = (100, 1_000, 10_000)
"""Token chunks in the journal; 1,000 chunks of 256 are 256,000 tokens, more than most models' context."""
CHUNKS_PER_STEP = 8
TOKENS = 256
ROUNDS = 5


def steps(count: int, chunks: Chunks) -> list[AnyEvent]:
    """A rollout's events with `count` token chunks: a generation, then an action on what it said, over and over."""
    events: list[AnyEvent] = [TrajectoryStarted("run", "task", bytes(4 * 512))]
    for step in range(1, count // CHUNKS_PER_STEP + 2):
        size = min(CHUNKS_PER_STEP, count - (step - 1) * CHUNKS_PER_STEP)
        if size <= 0:
            break
        events.append(GenerationStarted(step, "worker", "worker-1"))
        events += [chunks.event(number, generation=step) for number in range(size)]
        events.append(GenerationFinished(step, size * chunks.tokens, "stop"))
        events.append(ActionStarted(step, "python -m pytest", 60.0, "box-1"))
        events.append(ActionCommitted(step, 0, bytes(4 * 200), bytes(16), 0.5))
    return events


async def resume(store: RedisStore, length: int) -> Any:
    """One row: milliseconds for a journal with `length` chunks, each an entry of its own, in medians."""
    name = f"resume-{length}"
    stream = ids.trajectory(name)
    writer, _ = await take_over(store, stream, "benchmark")
    for event in steps(length, Chunks(TOKENS)):
        await writer.append(event)
    read_s: list[float] = []
    fold_s: list[float] = []
    open_s: list[float] = []
    history: list[Recorded] = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        history = await Reader(store, stream).catch_up()
        read = time.perf_counter()
        state = fold(history)
        read_s.append(read - begun)
        fold_s.append(time.perf_counter() - read)
        begun = time.perf_counter()
        trajectory = await Trajectory.open(store, name, writer="benchmark")
        open_s.append(time.perf_counter() - begun)
        assert trajectory.state.boundaries == state.boundaries
    return {
        "chunks": length,
        "tokens": length * TOKENS,
        "events": len(history),
        "read_and_check_ms": round(statistics.median(read_s) * 1e3, 2),
        "fold_ms": round(statistics.median(fold_s) * 1e3, 2),
        "open_ms": round(statistics.median(open_s) * 1e3, 2),
    }
