"""What `belayer status` says of events that a real server has lost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from belayer import ids
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.writer import take_over
from tests.cli.command import belayer
from tests.journal.faults import generation, lose_the_last_entry, two_stores, written


async def test_what_was_lost_and_whether_it_is_stored_again(tmp_path: Path) -> None:
    """The server loses the end of two streams; somebody else goes on with one of them before its writer is back."""
    restored, overtaken = ids.trajectory("restored"), ids.trajectory("overtaken")
    async with (
        EmbeddedServer(tmp_path / "r") as server,
        two_stores(tmp_path, server) as (proxy, store, other),
    ):
        first = await written(store, restored)
        second = await written(store, overtaken)
        await first.append(generation(3), generation(4))
        await second.append(generation(3))
        proxy.hold(b"INFO")
        await lose_the_last_entry(server, 2)
        successor, _ = await take_over(other, overtaken, "b")
        await successor.append(generation(7))
        proxy.release()
        await first.append(generation(9))
        table = await asyncio.to_thread(belayer, "status", "--url", server.url)
        told = await asyncio.to_thread(belayer, "status", "--url", server.url, "--json")
    losses = json.loads(told.stdout)["losses"]
    assert [(row["stream"], row["first_sequence"], row["last_sequence"], row["stored_again"]) for row in losses] == [
        ("trajectory/restored", 5, 6, True),
        ("trajectory/overtaken", 5, 5, False),
    ]
    assert all(row["epoch"] == 1 and 0 <= row["age_s"] < 60 for row in losses)
    again, gone = table.stdout.splitlines()[-2:]
    assert "2 events of trajectory/restored, sequence 5 to 6; stored again." in again
    assert "1 event of trajectory/overtaken, sequence 5; not stored again." in gone
