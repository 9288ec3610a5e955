"""A server that cannot now is waited for until the deadline, and then the error says why; nothing hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from belayer import ids
from belayer.errors import JournalUnavailableError
from belayer.journal.address import parse_address
from belayer.journal.durability import Durability
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.link import Link, NotReadyError
from belayer.journal.server_checks import check_server
from belayer.journal.writer import take_over
from tests.journal.faults import T, command, generation, hurried, opened, raw, said_in_the_end, stored, written
from tests.waiting import DEADLINE_S, until


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    """A server that a test may break."""
    async with EmbeddedServer(tmp_path / "r", settings={"busy-reply-threshold": "10"}) as server:
        yield server


async def test_out_of_memory_is_waited_out(server: EmbeddedServer) -> None:
    store = await opened(server.url)
    writer = await written(store)
    await command(server.url, "CONFIG", "SET", "maxmemory", "1")
    waiting = asyncio.create_task(writer.append(generation(9)))
    await asyncio.wait([waiting], timeout=0.1)
    assert not waiting.done()
    await command(server.url, "CONFIG", "SET", "maxmemory", "0")
    assert await waiting == 5
    await store.close()


async def test_out_of_memory_until_the_deadline_says_so_and_stores_nothing(server: EmbeddedServer) -> None:
    store = await opened(server.url)
    writer = await written(store)
    await command(server.url, "CONFIG", "SET", "maxmemory", "1")
    with hurried(store, 0.3):
        with pytest.raises(JournalUnavailableError):
            await writer.append(generation(9))
        await said_in_the_end(writer.retry, "OOM")
        await said_in_the_end(lambda: take_over(store, T, "b"), "OOM")
    await command(server.url, "CONFIG", "SET", "maxmemory", "0")
    assert await writer.retry() == 5
    assert len(await stored(store)) == 5
    await store.close()


async def test_a_server_busy_with_a_script_is_waited_for(server: EmbeddedServer) -> None:
    store = await opened(server.url)
    writer = await written(store)
    script = asyncio.create_task(raw(server.url, b"EVAL 'while true do end' 0\r\n"))
    await until(lambda: is_busy(server.url), what="BUSY")
    waiting = asyncio.create_task(writer.append(generation(9)))
    await asyncio.wait([waiting], timeout=0.1)
    assert not waiting.done()
    assert await raw(server.url, b"SCRIPT KILL\r\n") == b"+OK\r\n"
    assert await waiting == 5
    assert b"killed" in await script
    await store.close()


async def is_busy(url: str) -> bool:
    return b"BUSY" in await raw(url, b"EXISTS nothing\r\n")


async def test_a_server_that_is_loading_is_waited_for(tmp_path: Path) -> None:
    settings = {"key-load-delay": "20000", "loading-process-events-interval-bytes": "1024"}
    async with EmbeddedServer(tmp_path / "r", settings=settings) as server:
        store = await opened(server.url)
        writer = await written(store)
        for number in range(20):
            await command(server.url, "SET", f"filler{number}", "x" * 2000)
        await command(server.url, "BGREWRITEAOF")
        await until(lambda: rewritten(server), what="the rewrite")
        await server.kill()
        restarting = asyncio.create_task(server.start())
        assert await writer.append(generation(9)) == 5
        await restarting
        assert len(await stored(store)) == 5
        await store.close()


async def rewritten(server: EmbeddedServer) -> bool:
    info = await command(server.url, "INFO", "persistence")
    return b"aof_rewrite_in_progress:0" in info and any((server.folder / "appendonlydir").glob("*.2.base.rdb"))


async def test_a_demoted_primary_is_waited_for(server: EmbeddedServer) -> None:
    store = await opened(server.url)
    writer = await written(store)
    await command(server.url, "REPLICAOF", "127.0.0.1", "1")
    waiting = asyncio.create_task(writer.append(generation(9)))
    await asyncio.wait([waiting], timeout=0.2)
    assert not waiting.done()
    await command(server.url, "REPLICAOF", "NO", "ONE")
    assert await waiting == 5
    assert len(await stored(store)) == 5
    await store.close()


async def test_a_paused_server_is_waited_for_and_a_hung_one_has_a_deadline(server: EmbeddedServer) -> None:
    patient, hasty = await opened(server.url), await opened(server.url)
    first, second = await written(patient), await written(hasty, ids.trajectory("u"))
    os.kill(server.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(first.append(generation(9)))
    with hurried(hasty, 0.3), pytest.raises(JournalUnavailableError) as caught:
        await second.append(generation(9))
    assert caught.value.address == server.url
    assert not waiting.done()
    os.kill(server.pid, signal.SIGCONT)
    assert await waiting == 5
    assert await second.retry() == 5
    assert len(await stored(hasty, ids.trajectory("u"))) == 5
    await patient.close()
    await hasty.close()


async def test_a_server_that_is_gone_has_a_deadline_for_every_call(server: EmbeddedServer) -> None:
    store = await opened(server.url)
    writer = await written(store)
    await server.kill()
    calls = (
        writer.append(generation(9)),
        store.read(T),
        store.last(T),
        store.wait(T, 0, 5.0),
        store.streams(),
        store.remove(T),
        take_over(store, T, "b"),
    )
    with hurried(store, 0.2):
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, JournalUnavailableError), outcome
    await store.close()


async def test_a_server_that_loads_its_data_is_waited_for(tmp_path: Path) -> None:
    """While it loads it says `aof_enabled:0`: believed, that ended an actor's process in mid-start for good."""
    async with EmbeddedServer(tmp_path / "r", settings={"key-load-delay": "200", "appendfsync": "always"}) as server:
        store = await opened(server.url)
        writer = await written(store)
        # It answers after every 1,024 commands that it has loaded.
        await command(server.url, "EVAL", "for i = 1, 8000 do redis.call('SET', 'filler' .. i, i) end", "0")
        await server.kill()
        restarting = asyncio.create_task(server.start())
        while await found_fit(server.url):  # by the time that we asked, it had loaded everything
            await restarting
            await server.kill()
            restarting = asyncio.create_task(server.start())
        appended, other = await asyncio.gather(writer.append(generation(9)), opened(server.url))
        assert appended == 5
        assert len(await stored(other)) == 5
        await restarting
        await other.close()
        await store.close()


async def found_fit(url: str) -> bool:
    """What the check of the server says as soon as it listens; not that it has no append-only file."""
    await until(lambda: answers(url), what="the server")
    try:
        link = await Link.open(parse_address(url), "look", DEADLINE_S)
        with contextlib.closing(link):
            await check_server(link, url, Durability.EVERYSEC, 0, False, DEADLINE_S)
    except NotReadyError:
        return False
    return True


async def answers(url: str) -> bool:
    try:
        return bool(await raw(url, b"PING\r\n"))
    except OSError:
        return False
