"""Thousands of callers of one store: few connections, and every wait ends with its own stream's append."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from belayer import ids
from belayer.errors import JournalUnavailableError
from belayer.journal.connect import open_store
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.redis_store import RedisStore
from belayer.journal.server import SHARED_LINKS
from belayer.journal.writer import take_over
from tests.journal.faults import command, generation, stored, written
from tests.waiting import DEADLINE_S, within

STREAMS = [ids.trajectory(f"t{number}") for number in range(300)]


async def connections(url: str, name: bytes) -> int:
    listed = await command(url, "CLIENT", "LIST")
    return sum(b"name=" + name in line for line in listed.splitlines())


async def test_many_callers_share_a_few_connections(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "r") as server:
        store = await open_store(server.url)
        writers = await asyncio.gather(*(written(store, stream, 2) for stream in STREAMS))
        waits = [asyncio.create_task(store.wait(stream, 3, DEADLINE_S)) for stream in STREAMS]
        events = await asyncio.gather(*(stored(store, stream) for stream in STREAMS))
        assert [len(one) for one in events] == [3] * len(STREAMS)
        waiting = 1
        asking = 1
        assert await connections(server.url, b"belayer ") <= SHARED_LINKS + waiting + asking
        assert await connections(server.url, b"belayer-lane-0 ") == 1
        await asyncio.gather(*(writer.append(generation(9)) for writer in writers))
        assert await asyncio.gather(*waits) == [True] * len(STREAMS)
        await store.close()


async def test_each_wait_ends_with_its_own_stream(redis_store: RedisStore) -> None:
    writers = [await written(redis_store, stream, 1) for stream in STREAMS[:20]]
    waits = [asyncio.create_task(redis_store.wait(stream, 2, DEADLINE_S)) for stream in STREAMS[:20]]
    for number, writer in enumerate(writers):
        await writer.append(generation(9))
        assert await waits[number]
        assert not any(wait.done() for wait in waits[number + 1 :])


async def test_a_wait_that_joins_a_blocked_one_ends_at_once(redis_store: RedisStore) -> None:
    long = asyncio.create_task(redis_store.wait(STREAMS[0], 0, 1000.0))
    await asyncio.wait([long], timeout=0.05)
    for stream in STREAMS[1:10]:
        joined = asyncio.create_task(redis_store.wait(stream, 0, 1000.0))
        await asyncio.wait([joined], timeout=0.005)
        await take_over(redis_store, stream, "a")
        assert await within(joined)
    assert not long.done()
    long.cancel()
    assert await redis_store.wait(STREAMS[0], 0, 0.02) is False


async def test_waits_go_on_after_a_restart(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "r", settings={"appendfsync": "always"}) as server:
        store = await open_store(server.url)
        writer = await written(store)
        waits = [asyncio.create_task(store.wait(stream, 4, DEADLINE_S)) for stream in (writer.stream, STREAMS[5])]
        await asyncio.wait(waits, timeout=0.05)
        await server.kill()
        await server.start()
        await writer.append(generation(9))
        assert await waits[0]
        assert not waits[1].done()
        await store.close()
        with pytest.raises(JournalUnavailableError, match="closed"):
            await waits[1]
