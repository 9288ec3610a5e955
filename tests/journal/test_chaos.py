"""Random faults over a running load: what each durability mode's sentence promises is what is checked.

64 streams are written through two stores, some by rivals that take each other's epochs; meanwhile connections break,
replies are lost, servers are killed, paused, out of memory, demoted, failed over, and lose the end of their file.
BELAYER_TEST_FAULTS is how many faults there are (1,000 take minutes), BELAYER_TEST_SEED which. What came of them is
added, by mode, to the JSON file that BELAYER_TEST_FAULTS_FILE names.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import structlog

from belayer import ids
from belayer.errors import DamagedJournalError, FencedError, WrongSequenceError
from belayer.ids import StreamId
from belayer.journal.connect import open_store
from belayer.journal.embedded import EmbeddedServer, shipped_server
from belayer.journal.events import GenerationStarted
from belayer.journal.redis_store import RedisStore
from belayer.journal.writer import StreamWriter, take_over
from tests.journal.faults import Proxy, command, generation, paused, stored
from tests.journal.topologies import Sentineled, follow, sentineled
from tests.waiting import until

STREAMS = [ids.trajectory(f"t{number}") for number in range(64)]
FAULTS = int(os.environ.get("BELAYER_TEST_FAULTS", "0"))
SEED = int(os.environ.get("BELAYER_TEST_SEED", "1"))
FILE = os.environ.get("BELAYER_TEST_FAULTS_FILE")
log = structlog.get_logger("tests.chaos")
LOSABLE_S = 2.0
"""What a crash of the server's machine may take in mode everysec."""


class Acknowledged(NamedTuple):
    sequence: int
    number: int
    at: float


class Load:
    """Writers that never stop, and what was acknowledged to them on each stream."""

    def __init__(self, may_lose: bool) -> None:
        self.acknowledged: dict[StreamId, list[Acknowledged]] = {stream: [] for stream in STREAMS}
        self.appends = 0
        self.crashes: list[float] = []
        self.worst_append_s = 0.0
        self.worst_stall_s = 0.0
        """The longest time in which nothing was acknowledged to anybody."""
        self._newest = time.monotonic()
        self.stop = asyncio.Event()
        self._may_lose = may_lose

    async def write(self, store: RedisStore, stream: StreamId, rng: random.Random) -> None:
        writer: StreamWriter | None = None
        while not self.stop.is_set():
            try:
                if writer is None:
                    writer, _ = await take_over(store, stream, "w")
                self.appends += 1
                began = time.monotonic()
                group = [self.appends * 10 + number for number in range(rng.randint(1, 3))]
                last = await writer.append(*[generation(number) for number in group])
            except FencedError:
                writer = None
                continue
            except (WrongSequenceError, DamagedJournalError):
                assert self._may_lose
                writer = None
                continue
            now = time.monotonic()
            self.worst_append_s = max(self.worst_append_s, now - began)
            self.worst_stall_s, self._newest = max(self.worst_stall_s, now - self._newest), now
            for sequence, number in enumerate(group, last - len(group) + 1):
                self.acknowledged[stream].append(Acknowledged(sequence, number, now))
            if rng.random() < 0.002:
                writer = None

    async def go_on(self, appends: int) -> None:
        """Return once the writers have begun so many more appends."""
        before = self.appends
        await until(lambda: self.appends >= before + appends, what="progress of the writers")

    async def pause(self, seconds: float) -> None:
        """Let the writers be for a while."""
        await asyncio.wait([asyncio.create_task(self.stop.wait())], timeout=seconds)

    def may_be_lost(self, event: Acknowledged) -> bool:
        """Whether the mode's sentence allows it: it was acknowledged shortly before a crash."""
        return any(crash - LOSABLE_S <= event.at <= crash for crash in self.crashes)


class Single:
    """One server, of which one store knows through a proxy that breaks."""

    kinds = ("cut", "reply lost", "killed", "stopped", "out of memory", "demoted", "all cut by the server")

    def __init__(self, server: EmbeddedServer, proxy: Proxy) -> None:
        self.server = server
        self.proxy = proxy
        self.urls = (proxy.url, server.url)

    async def strike(self, kind: str, load: Load, rng: random.Random) -> None:
        match kind:
            case "cut":
                self.proxy.cut()
            case "reply lost":
                self.proxy.lose_reply(rng.choice([b"XADD", b"EVAL"]))
            case "killed":
                await self.server.kill()
                await self.server.start()
            case "stopped":
                with paused(self.server.pid):
                    await load.pause(rng.random() * 0.1)
            case "crashed":
                await self._crash(load, rng)
            case _:
                await strike_by_command(kind, self.server)

    async def _crash(self, load: Load, rng: random.Random) -> None:
        """What a crash of the machine does: the last part of the file, less than a second old, never got there."""
        (aof,) = (self.server.folder / "appendonlydir").glob("*.incr.aof")
        size = aof.stat().st_size
        await load.go_on(rng.randint(20, 200))
        await self.server.kill()
        load.crashes.append(time.monotonic())
        os.truncate(aof, rng.randint(size, aof.stat().st_size))
        await self.server.start()


class FailingOver:
    """A primary and a replica that take turns, named by Sentinel."""

    kinds = ("failed over", "replica killed", "paused", "replica stopped", "out of memory", "all cut by the server")

    def __init__(self, made: Sentineled) -> None:
        self.made = made
        self.urls = (made.url, made.url)

    async def strike(self, kind: str, load: Load, rng: random.Random) -> None:
        primary = await self.made.primary()
        (replica,) = (server for server in self.made.servers if server is not primary)
        match kind:
            case "failed over" | "paused":
                await until(lambda: follow(primary, 1), what="the replica")
                if kind == "paused":
                    with paused(primary.pid):
                        await self.made.fail_over(replica)
                else:
                    await primary.kill()
                    await self.made.fail_over(replica)
                    await primary.start()
            case "replica killed":
                await replica.kill()
                await load.pause(rng.random() * 0.2)
                await replica.start()
            case "replica stopped":
                with paused(replica.pid):
                    await load.pause(rng.random() * 0.2)
            case _:
                await strike_by_command(kind, primary)


async def strike_by_command(kind: str, server: EmbeddedServer) -> None:
    match kind:
        case "out of memory":
            await command(server.url, "CONFIG", "SET", "maxmemory", "1")
            await command(server.url, "CONFIG", "SET", "maxmemory", "0")
        case "demoted":
            await command(server.url, "REPLICAOF", "127.0.0.1", "1")
            await command(server.url, "REPLICAOF", "NO", "ONE")
        case _:
            await command(server.url, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


@asynccontextmanager
async def scene(folder: Path, durability: str) -> AsyncIterator[Single | FailingOver]:
    """Where the mode can be kept."""
    if durability == "replicated":
        async with sentineled(folder / "s") as made:
            yield FailingOver(made)
        return
    executable = shipped_server() if durability == "fsync" else None
    settings = {"appendfsync": "always" if durability == "fsync" else "everysec"}
    async with (
        EmbeddedServer(folder / "r", executable=executable, settings=settings) as server,
        Proxy(folder, server.url).running() as proxy,
    ):
        yield Single(server, proxy)


@pytest.mark.chaos
@pytest.mark.parametrize(("durability", "faults"), [("fsync", 40), ("everysec", 40), ("replicated", 10)])
async def test_random_faults_lose_no_more_than_the_mode_says_and_double_nothing(
    tmp_path: Path, durability: str, faults: int
) -> None:
    rng = random.Random(SEED)
    began = time.monotonic()
    async with scene(tmp_path, durability) as at:
        kinds = (*at.kinds, "crashed") if durability == "everysec" else at.kinds
        stores = [await open_store(url, durability=durability, timeout_s=60.0) for url in at.urls]
        load = Load(may_lose=durability == "everysec")
        async with asyncio.TaskGroup() as tasks:
            for number, stream in enumerate(STREAMS):
                tasks.create_task(load.write(stores[number % 2], stream, random.Random(rng.random())))
            for stream in STREAMS[::16]:
                tasks.create_task(load.write(stores[1], stream, random.Random(rng.random())))
            planned = [rng.choice(kinds) for _ in range(FAULTS or faults)]
            for kind in planned:
                await load.go_on(rng.randint(20, 200))
                await at.strike(kind, load, rng)
            await load.go_on(200)
            load.stop.set()
        missing: list[tuple[StreamId, Acknowledged]] = []
        doubled = 0
        for stream in STREAMS:
            events = [r for r in await stored(stores[1], stream) if isinstance(r.event, GenerationStarted)]
            found = {(recorded.sequence, recorded.event.generation) for recorded in events}
            doubled += len(events) - len({number for _, number in found})
            missing += [
                (stream, event) for event in load.acknowledged[stream] if (event.sequence, event.number) not in found
            ]
        reported = await stores[1].losses()
        record = {
            "faults": dict(sorted(Counter(planned).items())),
            "seed": SEED,
            "appends": load.appends,
            "events_acknowledged": sum(map(len, load.acknowledged.values())),
            "events_lost": len(missing),
            "events_doubled": doubled,
            "losses_reported": len(reported),
            "losses_stored_again": sum(loss.restored for loss in reported),
            "worst_append_s": round(load.worst_append_s, 2),
            "worst_stall_s": round(load.worst_stall_s, 2),
            "seconds": round(time.monotonic() - began),
        }
        log.info("chaos", durability=durability, **record)
        keep(durability, record)
        assert not doubled
        assert all(load.may_be_lost(event) for _, event in missing), missing
        assert not missing or any(not loss.restored for loss in reported)
        for store in stores:
            await store.close()


def keep(durability: str, record: dict[str, Any]) -> None:
    """Add what came of the faults to the file that was asked for."""
    if FILE is None:
        return
    path = Path(FILE)
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept["machine"] = {
        "processors": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_after": [round(load, 2) for load in os.getloadavg()],
    }
    path.write_text(json.dumps(kept | {durability: record}, indent=1) + "\n")
