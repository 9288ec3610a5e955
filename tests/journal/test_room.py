"""What waits in a process is bounded, and whoever waits for room is told: of room, of the end, of the deadline."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from belayer import ids
from belayer.errors import JournalUnavailableError
from belayer.journal.codec import GENESIS, Entry, encode_entry
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.events import GenerationStarted
from belayer.journal.redis_store import RedisStore
from tests.journal.faults import generation, opened, paused, two_stores, written
from tests.journal.topologies import Cluster
from tests.waiting import until, within

SIZE = 10_000


def large(number: int) -> Entry:
    """The first entry of a stream, about SIZE bytes."""
    event = GenerationStarted(number, "w" * SIZE, "i")
    return encode_entry(1, 0, GENESIS, [event], [ids.new_event_id()], 0)[0]


def submitted(store: RedisStore, number: int) -> asyncio.Task[None]:
    async def append() -> None:
        await store.append(ids.trajectory(f"t{number}"), large(number))

    return asyncio.create_task(append())


async def test_closing_a_store_ends_those_who_wait_for_room(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "r") as server:
        store = await opened(server.url, waiting_bytes=3 * SIZE, timeout_s=60.0)
        with paused(server.pid):
            appends = [submitted(store, number) for number in range(5)]
            await until(lambda: store.waiting_bytes > 2 * SIZE, what="no room")
            began = time.monotonic()
            await store.close()
            outcomes = await within(asyncio.gather(*appends, return_exceptions=True))
            assert time.monotonic() - began < 30.0
        assert [type(outcome) for outcome in outcomes] == [JournalUnavailableError] * 5
        assert all("the store is closed" in str(outcome) for outcome in outcomes)
        assert store.waiting_bytes == 0


async def test_appends_that_were_cancelled_make_room(tmp_path: Path) -> None:
    """They were dropped from the queue, and nobody told those who waited for their room until the next group."""
    async with EmbeddedServer(tmp_path / "r") as server:
        store = await opened(server.url, waiting_bytes=2 * SIZE, timeout_s=60.0)
        cancelled = submitted(store, 0)
        waiting = submitted(store, 1)
        loop = asyncio.get_running_loop()
        loop.call_soon(cancelled.cancel)
        await within(waiting)
        await store.close()


async def test_a_cluster_has_no_more_room_than_one_server(shared_cluster: Cluster, namespace: str) -> None:
    store = await opened(shared_cluster.url, namespace=namespace, shards=4, waiting_bytes=8 * SIZE)
    appends = [submitted(store, number) for number in range(40)]
    most = 0
    while not all(append.done() for append in appends):
        most = max(most, store.waiting_bytes)
        await asyncio.wait(appends, return_when=asyncio.FIRST_COMPLETED, timeout=0.001)
    await asyncio.gather(*appends)
    assert 0 < most <= 9 * SIZE
    await store.close()


async def test_reading_from_a_server_that_hangs_ends_at_the_deadline(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "r") as server:
        store = await opened(server.url, timeout_s=0.3)
        await written(store)
        os.kill(server.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(JournalUnavailableError):
            await store.last(ids.trajectory("t"))
        assert time.monotonic() - began < 8.0
        os.kill(server.pid, signal.SIGCONT)
        await store.close()


async def test_an_append_to_a_slow_server_ends_at_its_deadline(tmp_path: Path) -> None:
    """Each step in time, but connecting, asking, looking and sending together not: that took as long as all of them."""
    async with (
        EmbeddedServer(tmp_path / "r") as server,
        two_stores(tmp_path, server, timeout_s=0.5) as (proxy, store, other),
    ):
        writer = await written(store)
        proxy.slow_s = 0.4
        proxy.cut()
        with pytest.raises(JournalUnavailableError):
            await writer.append(generation(9))
        with pytest.raises(JournalUnavailableError):
            await store.streams()
        proxy.slow_s = 0.0
        assert await writer.retry() == 5
        assert len(await other.read(ids.trajectory("t"))) == 5
