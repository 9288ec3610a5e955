"""A link's deadlines: whoever waits longest for replies does not hide another's deadline."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from belayer.journal.address import parse_address
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.link import Link, LinkLostError, pack

PING = [pack((b"PING",))]
BLOCK = [pack((b"BLPOP", b"nothing", b"0"))]


async def test_a_shorter_deadline_behind_a_longer_one_ends_the_link(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "r") as server:
        link = await Link.open(parse_address(server.url), "test", 10.0)
        started = time.monotonic()
        blocked = asyncio.create_task(link.exchange(BLOCK, 1, 20.0))
        await asyncio.wait([blocked], timeout=0.01)
        with pytest.raises(LinkLostError, match=r"no reply within 0\.2 s"):
            await link.exchange(PING, 1, 0.2)
        with pytest.raises(LinkLostError):
            await blocked
        assert 0.2 <= time.monotonic() - started < 5.0
        assert link.is_lost


async def test_replies_in_time_leave_the_link_as_it_is_and_a_later_deadline_still_counts(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "r") as server:
        link = await Link.open(parse_address(server.url), "test", 10.0)
        assert await link.exchange(PING, 1, 0.1) == [b"PONG"]
        blocked = asyncio.create_task(link.exchange(BLOCK, 1, 0.4))
        await asyncio.wait([blocked], timeout=0.2)
        assert not blocked.done()
        with pytest.raises(LinkLostError, match=r"no reply within 0\.4 s"):
            await blocked
        with pytest.raises(LinkLostError):
            await link.exchange(PING, 1, 1.0)


async def test_a_caller_that_is_cancelled_leaves_the_link_in_order(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "r") as server:
        link = await Link.open(parse_address(server.url), "test", 10.0)
        brief = [pack((b"BLPOP", b"nothing", b"0.3"))]
        cancelled = asyncio.create_task(link.exchange(brief, 1, 0.1))
        await asyncio.wait([cancelled], timeout=0.01)
        cancelled.cancel()
        assert await link.exchange(PING, 1, 10.0) == [b"PONG"]
        assert cancelled.cancelled()
        link.close()
