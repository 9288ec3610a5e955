"""A read that broke off is gone on with at the next call: nothing that came is ever passed over."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from belayer.errors import MissingKeyError
from belayer.journal import writer as writing
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.events import ActionStarted
from belayer.journal.memory_store import MemoryStore
from belayer.journal.sealing import Keyring
from belayer.journal.writer import Reader, take_over
from tests.journal.faults import T, two_stores, written


async def test_what_came_before_a_read_broke_off_comes_at_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that goes away in the middle of a long stream, say: whoever reads on must not miss its beginning."""
    monkeypatch.setattr(writing, "_READ_LIMIT", 3)
    async with EmbeddedServer(tmp_path / "r") as server, two_stores(tmp_path, server) as (proxy, store, other):
        await written(other, count=7)
        reader = Reader(store, T)
        proxy.hold(b"(1-6")
        reading = asyncio.create_task(reader.catch_up())
        await proxy.held.wait()
        reading.cancel()
        await asyncio.wait([reading])
        proxy.release()
        assert [recorded.sequence for recorded in await reader.catch_up()] == list(range(1, 9))
        assert await reader.catch_up() == []


async def test_an_event_whose_key_is_missing_is_not_passed_over() -> None:
    """The key was dropped too early, in the middle of a stream; once it is there again, reading goes on."""
    old, new = Keyring({"old": b"1" * 32}), Keyring({"new": b"2" * 32})
    store = MemoryStore(keyring=new)
    writer, _ = await take_over(store, T, "a")
    await writer.append(ActionStarted(1, "first", 1.0, "i"))
    store.keyring = old
    await writer.append(ActionStarted(2, "second", 1.0, "i"))
    store.keyring = new
    reader = Reader(store, T)
    with pytest.raises(MissingKeyError):
        await reader.catch_up()
    with pytest.raises(MissingKeyError):
        await reader.catch_up()
    store.keyring = Keyring({"new": b"2" * 32, "old": b"1" * 32})
    events = [recorded.event for recorded in await reader.catch_up()]
    assert [event.command for event in events if isinstance(event, ActionStarted)] == ["first", "second"]
