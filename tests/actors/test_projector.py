"""Warm states over a server that loses events: what was folded is forgotten when it does not fit what comes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from belayer import ids
from belayer.actors.projector import Projector
from belayer.errors import DamagedJournalError
from belayer.journal.codec import Recorded
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.store import JournalStore
from belayer.journal.writer import take_over
from tests.journal.faults import command, generation, lose_the_last_entry, opened, written

State = tuple[tuple[int, bytes], ...]


def collect(events: Iterable[Recorded], state: State) -> State:
    return state + tuple((recorded.epoch, recorded.event_id) for recorded in events)


def projector(store: JournalStore) -> Projector[State]:
    return Projector[State](store, ids.trajectory, collect, ())


async def test_a_warm_state_that_is_ahead_of_a_server_which_lost_events_is_read_again(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "r") as server:
        store = await opened(server.url, held_bytes=0)
        await written(store)
        warm = projector(store)
        assert len(await warm.look("t")) == 4
        await lose_the_last_entry(server)
        await take_over(store, ids.trajectory("t"), "b")
        with_successor = await warm.look("t")
        assert [epoch for epoch, _ in with_successor] == [1, 1, 1, 2]
        assert with_successor == await projector(store).look("t")
        await store.close()


async def test_a_stream_that_is_damaged_in_itself_is_still_refused(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "r") as server:
        store = await opened(server.url)
        writer = await written(store)
        warm = projector(store)
        await warm.look("t")
        await writer.append(generation(9))
        await command(server.url, "XDEL", "{belayer:default:0}:s:trajectory/t", "1-2")
        await command(server.url, "XDEL", "{belayer:default:0}:s:trajectory/t", "1-5")
        await writer.append(generation(10))
        for _ in range(2):
            with pytest.raises(DamagedJournalError, match="follows sequence 1"):
                await warm.look("t")
        await store.close()
