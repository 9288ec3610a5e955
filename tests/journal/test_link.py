"""A link's deadlines: whoever waits longest for replies does not hide another's deadline."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from belayer.journal.address import parse_address
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.link import Link, LinkLostError, pack
from tests.waiting import DEADLINE_S, until, within

PING = [pack((b"PING",))]
BLOCK = [pack((b"BLPOP", b"nothing", b"0"))]


async def test_a_shorter_deadline_behind_a_longer_one_ends_the_link(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "r") as server:
        link = await Link.open(parse_address(server.url), "test", DEADLINE_S)
        blocked = asyncio.create_task(link.exchange(BLOCK, 1, 10 * DEADLINE_S))
        await asyncio.wait([blocked], timeout=0.01)
        with pytest.raises(LinkLostError, match=r"no reply within 0\.2 s"):
            await within(link.exchange(PING, 1, 0.2))
        with pytest.raises(LinkLostError):
            await within(blocked)
        assert link.is_lost


async def test_replies_in_time_leave_the_link_as_it_is_and_a_later_deadline_still_counts(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "r") as server:
        link = await Link.open(parse_address(server.url), "test", DEADLINE_S)
        assert await link.exchange(PING, 1, DEADLINE_S) == [b"PONG"]
        with pytest.raises(LinkLostError, match=r"no reply within 0\.4 s"):
            await within(link.exchange(BLOCK, 1, 0.4))
        with pytest.raises(LinkLostError):
            await link.exchange(PING, 1, DEADLINE_S)


async def test_a_caller_that_is_cancelled_leaves_the_link_in_order(tmp_path: Path) -> None:
    """Its deadline is nobody's any more, though the reply comes after it."""
    async with EmbeddedServer(tmp_path / "r") as server:
        brief = [pack((b"BLPOP", b"nothing", b"0.6"))]

        async def cancelled_in_time() -> Link | None:
            link = await Link.open(parse_address(server.url), "test", DEADLINE_S)
            asking = asyncio.create_task(link.exchange(brief, 1, 0.3))
            await asyncio.wait([asking], timeout=0)
            asking.cancel()
            await asyncio.wait([asking])
            return link if asking.cancelled() else link.close()

        link = await until(cancelled_in_time, what="a caller that is cancelled before its deadline")
        assert await link.exchange(PING, 1, DEADLINE_S) == [b"PONG"]
        link.close()
