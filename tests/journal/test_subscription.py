"""Subscriptions over real faults: restarts, a lost group, a lost reply, consumers that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from belayer import ids
from belayer.errors import CodecError
from belayer.journal.connect import open_store
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.events import TrajectoryStarted
from belayer.journal.redis_store import RedisStore
from belayer.journal.server_checks import parse_info
from belayer.journal.store import Notice, Subscription
from belayer.journal.writer import take_over
from tests.journal.faults import Proxy, command
from tests.waiting import DEADLINE_S, within


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer(tmp_path / "r", settings={"appendfsync": "always"}) as server:
        yield server


async def noticed(store: RedisStore, name: str) -> None:
    writer, _ = await take_over(store, ids.trajectory(name), "a")
    await writer.append(TrajectoryStarted("run", "task", b""))


async def test_a_blocked_next_goes_on_after_a_restart(server: EmbeddedServer) -> None:
    store = await open_store(server.url)
    async with store.subscribe("g", "c") as notices:
        waiting = asyncio.create_task(notices.next(DEADLINE_S))
        await asyncio.wait([waiting], timeout=0.1)
        await server.kill()
        await server.start()
        await noticed(store, "t")
        notice = await waiting
        assert notice is not None and notice.stream == ids.trajectory("t")
    await store.close()


async def test_a_pending_notice_survives_a_restart_and_its_consumer(server: EmbeddedServer) -> None:
    store = await open_store(server.url)
    await noticed(store, "t")
    async with store.subscribe("g", "dead", 0.1) as notices:
        assert await notices.next(DEADLINE_S) is not None
    await server.kill()
    await server.start()
    async with store.subscribe("g", "alive", 0.1) as notices:
        notice = await notices.next(DEADLINE_S)
        assert notice is not None
        await notices.done(notice)
        assert await notices.next(0.2) is None
    await store.close()


async def test_a_lost_group_is_created_again_from_the_start(redis_url: str, namespace: str) -> None:
    store = await open_store(redis_url, namespace=namespace)
    await noticed(store, "t")
    async with store.subscribe("g", "c") as notices:
        first = await notices.next(DEADLINE_S)
        assert first is not None
        await command(redis_url, "XGROUP", "DESTROY", f"{{belayer:{namespace}:0}}:control", "g")
        await notices.renew(first)
        again = await notices.next(DEADLINE_S)
        assert again is not None and again.stream == first.stream
        await notices.done(again)
        await command(redis_url, "DEL", f"{{belayer:{namespace}:0}}:control")
        await noticed(store, "u")
        new = await notices.next(DEADLINE_S)
        assert new is not None and new.stream == ids.trajectory("u")
    await store.close()


async def test_a_notice_whose_delivery_was_lost_goes_stale_and_comes(
    tmp_path: Path, redis_url: str, namespace: str
) -> None:
    direct = await open_store(redis_url, namespace=namespace)
    await noticed(direct, "t")
    async with Proxy(tmp_path, redis_url).running() as proxy:
        store = await open_store(proxy.url, namespace=namespace)
        async with store.subscribe("g", "c", 0.1) as notices:
            proxy.lose_reply(b"XREADGROUP")
            notice = await notices.next(DEADLINE_S)
            assert proxy.lost == 1
            assert notice is not None and notice.stream == ids.trajectory("t")
            await notices.done(notice)
        await store.close()
    await direct.close()


async def test_a_consumer_that_leaves_with_nothing_pending_is_forgotten(redis_url: str, namespace: str) -> None:
    store = await open_store(redis_url, namespace=namespace)
    control = f"{{belayer:{namespace}:0}}:control"
    await noticed(store, "t")
    async with store.subscribe("g", "busy") as notices:
        assert await notices.next(DEADLINE_S) is not None
    async with store.subscribe("g", "idle") as notices:
        assert await notices.next(0.01) is None
    consumers = await command(redis_url, "XINFO", "CONSUMERS", control, "g")
    assert [consumer[1] for consumer in consumers] == [b"busy"]
    await store.close()


async def test_something_else_on_the_control_stream_is_named(redis_url: str, namespace: str) -> None:
    store = await open_store(redis_url, namespace=namespace)
    await command(redis_url, "XADD", f"{{belayer:{namespace}:0}}:control", "*", "x", "y")
    async with store.subscribe("g", "c") as notices:
        with pytest.raises(CodecError, match="not a notice"):
            await notices.next(DEADLINE_S)
    await store.close()


async def test_stale_notices_are_found_among_many_that_are_not(redis_store: RedisStore) -> None:
    """A dead consumer's notices lie after hundreds that a living one keeps renewing."""
    await asyncio.gather(*(noticed(redis_store, f"t{number}") for number in range(600)))
    async with (
        redis_store.subscribe("g", "living", 1000.0) as living,
        redis_store.subscribe("g", "dead", 1000.0) as dead,
        redis_store.subscribe("g", "heir", 1.0) as heir,
    ):
        watched = [await living.next(DEADLINE_S) for _ in range(597)]
        left = [await dead.next(DEADLINE_S) for _ in range(3)]
        missing = {notice.stream for notice in left if notice is not None}

        async def inherit() -> None:
            while missing:  # on a busy machine one of the living's may be late too
                missing.discard((await all_of(heir, 1))[0].stream)

        inheriting = asyncio.create_task(within(inherit()))
        while not inheriting.done():
            await asyncio.gather(*(living.renew(notice) for notice in watched if notice is not None))
        await inheriting


async def all_of(subscription: Subscription, count: int) -> list[Notice]:
    found: list[Notice] = []
    while len(found) < count:
        if (notice := await subscription.next(DEADLINE_S)) is not None:
            found.append(notice)
    return found


async def test_renewals_travel_together(redis_url: str, redis_store: RedisStore) -> None:
    await asyncio.gather(*(noticed(redis_store, f"t{number}") for number in range(100)))
    async with redis_store.subscribe("g", "c") as notices:
        watched = await all_of(notices, 100)
        before = await calls(redis_url, "xclaim")
        await asyncio.gather(*(notices.renew(notice) for notice in watched))
        assert await calls(redis_url, "xclaim") - before == 1


async def calls(url: str, command_name: str) -> int:
    """How often the server was asked that."""
    stats = parse_info(await command(url, "INFO", "commandstats"))
    return int(stats.get(f"cmdstat_{command_name}", "calls=0,").split("calls=")[1].split(",")[0])
