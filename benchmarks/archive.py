"""What archiving costs and saves: `python -m benchmarks.archive [--json]`.

Trajectories of 32 chunks of 256 tokens go to a real server, then through the archiver into a folder. Measured: bytes on
the server before and after, bytes of the segments, seconds of archiving and of verifying. Token ids are drawn from a
Zipf distribution over 150,000 (repetitive as text is), logprobs as -x**3 of a uniform x: their mantissas are random, as
real ones are, so zstd gains next to nothing on them. Everything is read back across both afterwards. Figures go to
benchmarks/results/archive.json, which `benchmarks.capacity` reads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from belayer import ids
from belayer.actors.archiver import Archiver
from belayer.journal.archive import open_archive
from belayer.journal.archive_upkeep import verify
from belayer.journal.archived_store import ArchivedStore
from belayer.journal.codec import encode_entry
from belayer.journal.columns import pack_logprobs, pack_token_ids
from belayer.journal.connect import open_store
from belayer.journal.durability import Durability
from belayer.journal.events import (
    AnyEvent,
    EpochStarted,
    GenerationFinished,
    GenerationStarted,
    SandboxCreated,
    SandboxRemoved,
    SandboxSpec,
    TokensAppended,
    TrajectoryFinished,
    TrajectoryStarted,
)
from belayer.journal.redis_store import RedisStore
from belayer.journal.server_checks import parse_info
from belayer.journal.writer import read_events
from benchmarks.journal import ask, fresh_server, machine

RESULTS = Path(__file__).with_name("results") / "archive.json"
TRAJECTORIES = 256
CHUNKS = 32
CHUNK_TOKENS = 256
VOCABULARY = 150_000


def chunk(source: random.Random, offset: int) -> TokensAppended:
    """A chunk as an engine might have made it."""
    token_ids = [min(VOCABULARY, int(source.paretovariate(0.6))) for _ in range(CHUNK_TOKENS)]
    logprobs = [-(source.random() ** 3) for _ in range(CHUNK_TOKENS)]
    mask = b"\x01" * CHUNK_TOKENS
    return TokensAppended(1, offset, CHUNK_TOKENS, pack_token_ids(token_ids), pack_logprobs(logprobs), mask, 1)


def stream_of(source: random.Random) -> list[AnyEvent]:
    """A finished trajectory."""
    chunks = [chunk(source, number * CHUNK_TOKENS) for number in range(CHUNKS)]
    prompt = pack_token_ids(range(500))
    start: list[AnyEvent] = [EpochStarted(1, "rollout"), TrajectoryStarted("run", "task", prompt)]
    end: list[AnyEvent] = [GenerationFinished(1, CHUNKS * CHUNK_TOKENS, "stop"), TrajectoryFinished("done", 1.0)]
    return [*start, GenerationStarted(1, "w", "w-1"), *chunks, *end]


def box_of(number: int) -> list[AnyEvent]:
    """Its sandbox's stream."""
    created = SandboxCreated(f"t{number}-1", "c" * 64, "sha256:" + "0" * 64, "host", 1, 1, "run", SandboxSpec("image"))
    return [EpochStarted(1, "actors/a"), created, SandboxRemoved(f"t{number}-1", "the trajectory is finished")]


async def write(store: RedisStore, stream: ids.StreamId, events: list[AnyEvent]) -> None:
    digest = bytes(16)
    for sequence, event in enumerate(events):
        entry, digest = encode_entry(1, sequence, digest, [event], [ids.new_event_id()], time.time_ns())
        await store.append(stream, entry)


async def used_bytes(url: str) -> int:
    return int(parse_info(await ask(url, "INFO", "memory"))["used_memory"])


async def measure() -> dict[str, Any]:
    source = random.Random(1)
    async with fresh_server(Durability.EVERYSEC) as server:
        store = await open_store(server.url)
        empty = await used_bytes(server.url)
        names = [f"t{number}" for number in range(TRAJECTORIES)]
        for number, name in enumerate(names):
            await write(store, ids.trajectory(name), stream_of(source))
            await write(store, ids.sandbox(name), box_of(number))
        full = await used_bytes(server.url)
        with tempfile.TemporaryDirectory(prefix="belayer-benchmark-") as folder:
            archive = open_archive(folder, "default")
            started = time.perf_counter()
            outcomes = await Archiver(store, archive, "archiver").archive(names)
            archived_s = time.perf_counter() - started
            assert not any(outcomes.values()), outcomes
            started = time.perf_counter()
            found = await verify(archive, store)
            verified_s = time.perf_counter() - started
            both = ArchivedStore(store, archive)
            events = 0
            for name in names:
                events += len([recorded async for recorded in read_events(both, ids.trajectory(name))])
        marked = await used_bytes(server.url)
        for stream in await store.streams():
            await store.remove(stream)
        left = marked - await used_bytes(server.url)
        await store.close()
    tokens = TRAJECTORIES * CHUNKS * CHUNK_TOKENS
    assert found.problems == [] and events == TRAJECTORIES * (CHUNKS + 5 + 2)
    return {
        "tokens": tokens,
        "trajectories": TRAJECTORIES,
        "server_bytes_per_token": round((full - empty) / tokens, 2),
        "raw_bytes_per_token": round(found.raw_bytes / tokens, 3),
        "archive_bytes_per_token": round(found.size_bytes / tokens, 3),
        "compression": round(found.raw_bytes / found.size_bytes, 3),
        "server_bytes_left_per_trajectory": round(left / TRAJECTORIES),
        "archiver_mb_per_s": round(found.raw_bytes / archived_s / 1e6, 1),
        "archiver_tokens_per_s": round(tokens / archived_s),
        "verify_mb_per_s": round(found.raw_bytes / verified_s / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    options = parser.parse_args()
    figures = asyncio.run(measure())
    RESULTS.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n")
    if not options.json:
        for name, value in figures.items():
            print(f"{name:36} {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
