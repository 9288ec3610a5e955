"""`belayer status` of many trajectories: what needs a look comes first, few rows, only those that were asked for."""

from __future__ import annotations

import time
from io import StringIO

import pytest
from rich.console import Console

from belayer.cli.status_rows import Board, Snapshot
from belayer.cli.status_table import tables
from belayer.client import Trajectory
from belayer.ids import trajectory
from belayer.journal.events import RecoveryStarted
from belayer.journal.memory_store import MemoryStore
from belayer.journal.writer import take_over


@pytest.fixture
async def store() -> MemoryStore:
    """t-1 to t-12 of two runs: t-1 to t-9 finished, t-10 under recovery, t-11 aborted, t-12 open."""
    store = MemoryStore()
    for number in range(1, 13):
        opened = await Trajectory.open(store, f"t-{number}")
        await opened.start("night" if number > 4 else "day", "task", [1])
        if number < 10:
            await opened.finish("done")
        elif number == 11:
            await opened.abort("given up")
    writer, _ = await take_over(store, trajectory("t-10"), "recovery")
    await writer.append(RecoveryStarted("c-1", "plan", "recovery"))
    return store


async def look(store: MemoryStore, run: str | None = None, *states: str) -> Snapshot:
    return await Board(store, run, states).look(time.time_ns())


def printed(snapshot: Snapshot, limit: int) -> list[str]:
    console = Console(file=StringIO(), width=120, color_system=None)
    console.print(tables(snapshot, limit))
    assert isinstance(console.file, StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def named(lines: list[str]) -> list[str]:
    return [line.split()[0] for line in lines if line.startswith("t-")]


async def test_what_needs_a_look_comes_first_and_numbers_are_counted(store: MemoryStore) -> None:
    lines = printed(await look(store), 0)
    assert lines[0] == "Trajectories: 1 recovering, 1 aborted, 1 open, 9 finished"
    assert named(lines) == ["t-10", "t-11", "t-12", *(f"t-{number}" for number in range(1, 10))]


async def test_rows_beyond_the_limit_are_counted_not_shown(store: MemoryStore) -> None:
    lines = printed(await look(store), 4)
    assert named(lines) == ["t-10", "t-11", "t-12", "t-1"]
    assert "8 finished more are not shown; --limit 0 shows all, --state and --run choose." in lines


async def test_a_run_and_states_are_chosen(store: MemoryStore) -> None:
    assert {row.trajectory for row in (await look(store, "day")).trajectories} == {"t-1", "t-2", "t-3", "t-4"}
    snapshot = await look(store, "night", "recovering", "open")
    assert {row.trajectory for row in snapshot.trajectories} == {"t-10", "t-12"}
    assert snapshot.others == 10
    assert printed(await look(store, "nosuch"), 0)[0] == "There is nothing here that was asked for."
    assert printed(await look(MemoryStore()), 0)[0] == "The journal is empty."
