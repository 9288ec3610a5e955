"""A disk that is full or slow, and memory that is: appends wait and say why; nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer import ids
from belayer.errors import JournalUnavailableError
from belayer.journal.embedded import EmbeddedServer, shipped_server
from belayer.journal.events import TokensAppended
from belayer.journal.redis_store import RedisStore
from belayer.journal.writer import StreamWriter
from tests.journal.faults import command, generation, hurried, opened, stored, written
from tests.waiting import until

DISK_BYTES = 4 << 20
BALLAST_BYTES = 2 << 20
FULL_WAIT_S = 0.5


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for little, half of it taken by a file that a test may remove."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "belayer-test", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        (folder / "ballast").write_bytes(bytes(BALLAST_BYTES))
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def chunk(number: int) -> TokensAppended:
    """Something of 40 KB."""
    count = 4096
    return TokensAppended(1, number * count, count, bytes(4 * count), bytes(4 * count), b"\x01" * count, 0)


async def append_until_refused(store: RedisStore, writers: list[StreamWriter], cause: str) -> int:
    """How many appends were acknowledged before every writer was refused; the error says the cause."""
    acknowledged = 0

    async def work(writer: StreamWriter) -> None:
        nonlocal acknowledged
        number = 0
        while True:
            try:
                await writer.append(chunk(number))
            except JournalUnavailableError as refused:
                if re.search(cause, str(refused)):
                    return
                await until(lambda: has_recovered([writer]), what="an answer to a call that was late")
            acknowledged += 1
            number += 1

    with hurried(store, FULL_WAIT_S):
        await asyncio.gather(*(work(writer) for writer in writers))
    return acknowledged


async def has_recovered(writers: list[StreamWriter]) -> bool:
    """Whether all that had no known outcome is stored."""
    try:
        await asyncio.gather(*(writer.retry() for writer in writers))
    except JournalUnavailableError:
        return False
    return True


async def test_a_full_disk_stops_appends_until_there_is_room(small_disk: Path) -> None:
    """everysec: the server refuses writes (MISCONF) and keeps what it could not write yet in memory."""
    async with EmbeddedServer(small_disk / "r") as server:
        store = await opened(server.url)
        writers = [await written(store, ids.trajectory(f"t{number}"), 0) for number in range(4)]
        acknowledged = await append_until_refused(store, writers, "MISCONF")
        (small_disk / "ballast").unlink()
        await until(lambda: has_recovered(writers), what="room on the disk")
        await until(lambda: is_written(server), what="the file")
        await server.kill()
        await server.start()
        counts = [len(await stored(store, writer.stream)) for writer in writers]
        assert counts == [writer.sequence for writer in writers]
        assert sum(counts) == acknowledged + 2 * len(writers)
        await store.close()


async def is_written(server: EmbeddedServer) -> bool:
    return b"aof_last_write_status:ok" in await command(server.url, "INFO", "persistence")


async def test_a_full_disk_ends_a_server_that_syncs_always_and_nothing_acknowledged_is_lost(small_disk: Path) -> None:
    """fsync: the server cannot keep its word any more and exits; whoever starts it again goes on."""
    settings = {"appendfsync": "always"}
    async with EmbeddedServer(small_disk / "r", executable=shipped_server(), settings=settings) as server:
        store = await opened(server.url, durability="fsync")
        writers = [await written(store, ids.trajectory(f"t{number}"), 0) for number in range(4)]
        acknowledged = await append_until_refused(store, writers, "closed|refused|No such file|broke")
        (small_disk / "ballast").unlink()
        await server.restart()
        await until(lambda: has_recovered(writers), what="room on the disk")
        counts = [len(await stored(store, writer.stream)) for writer in writers]
        assert counts == [writer.sequence for writer in writers]
        assert sum(counts) == acknowledged + 2 * len(writers)
        await store.close()


async def test_memory_that_fills_up_stops_appends_until_there_is_more(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "r", settings={"maxmemory": "4mb"}) as server:
        store = await opened(server.url)
        writers = [await written(store, ids.trajectory(f"t{number}"), 0) for number in range(4)]
        acknowledged = await append_until_refused(store, writers, "OOM")
        assert len(await store.streams()) == 4
        await command(server.url, "CONFIG", "SET", "maxmemory", "0")
        await until(lambda: has_recovered(writers), what="memory")
        counts = [len(await stored(store, writer.stream)) for writer in writers]
        assert counts == [writer.sequence for writer in writers]
        assert sum(counts) == acknowledged + 2 * len(writers)
        await store.close()


@pytest.mark.parametrize("durability", ["everysec", "fsync"])
async def test_a_slow_disk_slows_appends_down_and_loses_nothing(tmp_path: Path, durability: str) -> None:
    """Every write of the file takes 50 ms; many appends share one, and each waits for its own."""
    settings = {"appendfsync": "always" if durability == "fsync" else "everysec", "enable-debug-command": "local"}
    async with EmbeddedServer(tmp_path / "r", executable=shipped_server(), settings=settings) as server:
        store = await opened(server.url, durability=durability)
        writers = [await written(store, ids.trajectory(f"t{number}"), 0) for number in range(64)]
        await command(server.url, "DEBUG", "AOF-FLUSH-SLEEP", "50000")
        for number in range(5):
            await asyncio.gather(*(writer.append(generation(number)) for writer in writers))
        await server.kill()
        await server.start()
        for writer in writers:
            assert len(await stored(store, writer.stream)) == 6
        await store.close()
