"""Random faults over a running load, in mode fsync: nothing acknowledged is lost, nothing is there twice.

64 streams are written through two stores, some by rivals that take each other's epochs; meanwhile connections break,
replies are lost, the server is killed and started, stopped for a while, out of memory, demoted. BELAYER_TEST_FAULTS is
how many faults there are (1,000 take minutes), BELAYER_TEST_SEED which.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from belayer import ids
from belayer.errors import FencedError
from belayer.ids import StreamId
from belayer.journal.connect import open_store
from belayer.journal.embedded import EmbeddedServer, shipped_server
from belayer.journal.events import GenerationStarted
from belayer.journal.redis_store import RedisStore
from belayer.journal.writer import StreamWriter, take_over
from tests.journal.faults import Proxy, command, generation, stored
from tests.waiting import until

STREAMS = [ids.trajectory(f"t{number}") for number in range(64)]
FAULTS = int(os.environ.get("BELAYER_TEST_FAULTS", "40"))
SEED = int(os.environ.get("BELAYER_TEST_SEED", "1"))


class Load:
    """Writers that never stop, and what was acknowledged to them: the event at each sequence of each stream."""

    def __init__(self) -> None:
        self.acknowledged: dict[StreamId, dict[int, int]] = {stream: {} for stream in STREAMS}
        self.appends = 0
        self.stop = asyncio.Event()

    async def write(self, store: RedisStore, stream: StreamId, rng: random.Random) -> None:
        writer: StreamWriter | None = None
        while not self.stop.is_set():
            try:
                if writer is None:
                    writer, _ = await take_over(store, stream, "w")
                self.appends += 1
                group = [self.appends * 10 + number for number in range(rng.randint(1, 3))]
                last = await writer.append(*[generation(number) for number in group])
            except FencedError:
                writer = None
                continue
            for sequence, number in enumerate(group, last - len(group) + 1):
                assert sequence not in self.acknowledged[stream]
                self.acknowledged[stream][sequence] = number
            if rng.random() < 0.002:
                writer = None

    async def go_on(self, appends: int) -> None:
        """Return once the writers have begun so many more appends."""
        before = self.appends
        await until(lambda: self.appends >= before + appends, 30.0, "progress of the writers")


async def strike(kind: str, server: EmbeddedServer, proxy: Proxy, load: Load, rng: random.Random) -> None:
    match kind:
        case "cut":
            proxy.cut()
        case "reply lost":
            proxy.lose_reply(rng.choice([b"XADD", b"EVAL"]))
        case "killed":
            await server.kill()
            await server.start()
        case "stopped":
            os.kill(server.pid, signal.SIGSTOP)
            await asyncio.wait([asyncio.create_task(load.stop.wait())], timeout=rng.random() * 0.1)
            os.kill(server.pid, signal.SIGCONT)
        case "out of memory":
            await command(server.url, "CONFIG", "SET", "maxmemory", "1")
            await command(server.url, "CONFIG", "SET", "maxmemory", "0")
        case "demoted":
            await command(server.url, "REPLICAOF", "127.0.0.1", "1")
            await command(server.url, "REPLICAOF", "NO", "ONE")
        case _:
            await command(server.url, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


KINDS = ("cut", "reply lost", "killed", "stopped", "out of memory", "demoted", "all cut by the server")


@pytest.mark.chaos
async def test_random_faults_lose_and_double_nothing(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    settings = {"appendfsync": "always"}
    async with (
        EmbeddedServer(tmp_path / "r", executable=shipped_server(), settings=settings) as server,
        Proxy(tmp_path, server.url).running() as proxy,
    ):
        stores = [await open_store(url, durability="fsync", timeout_s=30.0) for url in (proxy.url, server.url)]
        load = Load()
        async with asyncio.TaskGroup() as tasks:
            for number, stream in enumerate(STREAMS):
                tasks.create_task(load.write(stores[number % 2], stream, random.Random(rng.random())))
            for stream in STREAMS[::16]:
                tasks.create_task(load.write(stores[1], stream, random.Random(rng.random())))
            for _ in range(FAULTS):
                await load.go_on(rng.randint(20, 200))
                await strike(rng.choice(KINDS), server, proxy, load, rng)
            await load.go_on(200)
            load.stop.set()
        for stream in STREAMS:
            events = [r for r in await stored(stores[1], stream) if isinstance(r.event, GenerationStarted)]
            found = {recorded.sequence: recorded.event.generation for recorded in events}
            assert len(set(found.values())) == len(found)
            assert load.acknowledged[stream].items() <= found.items()
        for store in stores:
            await store.close()
