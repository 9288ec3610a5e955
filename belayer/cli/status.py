"""`belayer status`: every trajectory, worker and run of a journal, as their streams say it now. Takes no epoch."""

from __future__ import annotations

import asyncio
import enum
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from belayer.cli.options import AsJson, Namespace, Url, open_journal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from belayer.cli.status_rows import Board, Snapshot

HELP = """Show every trajectory, worker and run of a journal: where it stands, who holds it, how old its last event is.

At the end: which acknowledged events a server was found to have lost, and whether they are stored again.

Examples:

  belayer status --url redis://journal:6379

  belayer status --watch

  belayer status --run night --state recovering --state aborted

  belayer status --json | jq '.trajectories[] | select(.state == "recovering")'

  belayer status --json | jq '.losses[] | select(.stored_again | not)'
"""


class State(enum.StrEnum):
    """Where a trajectory stands."""

    EMPTY = "empty"
    OPEN = "open"
    RECOVERING = "recovering"
    FINISHED = "finished"
    ABORTED = "aborted"


def status(
    url: Url = None,
    namespace: Namespace = "default",
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again and again until Ctrl-C.")] = False,
    run: Annotated[str | None, typer.Option(help="Only trajectories of this run.")] = None,
    states: Annotated[
        list[State] | None, typer.Option("--state", help="Only trajectories in this state; may be given again.")
    ] = None,
    limit: Annotated[
        int, typer.Option(help="Rows of trajectories in the table, what needs a look first; 0: all.", min=0)
    ] = 100,
    every_s: Annotated[float, typer.Option("--every", help="Seconds between two looks of --watch.", min=0.1)] = 1.0,
) -> None:
    asyncio.run(_status(url, namespace, (run, states or ()), None if as_json else limit, every_s if watch else None))


async def _status(
    url: str | None, namespace: str, wanted: tuple[str | None, Sequence[str]], limit: int | None, every_s: float | None
) -> None:
    """`limit`: None for JSON. `every_s`: None for one look."""
    from belayer.cli.status_rows import Board

    async with open_journal(url, namespace) as store:
        board = Board(store, *wanted)
        if every_s is not None:
            await (_print_each(board, every_s) if limit is None else _watch(board, every_s, limit))
        else:
            _print(await board.look(time.time_ns()), limit)


async def _watch(board: Board, every_s: float, limit: int) -> None:
    from rich.live import Live

    from belayer.cli.status_table import tables

    with Live(auto_refresh=False, screen=sys.stdout.isatty()) as live:
        while True:
            live.update(tables(await board.look(time.time_ns()), limit), refresh=True)
            await asyncio.sleep(every_s)


async def _print_each(board: Board, every_s: float) -> None:
    while True:
        _print(await board.look(time.time_ns()), None)
        await asyncio.sleep(every_s)


def _print(snapshot: Snapshot, limit: int | None) -> None:
    if limit is None:
        import msgspec

        sys.stdout.write(msgspec.json.encode(snapshot).decode() + "\n")
        sys.stdout.flush()
    else:
        from rich.console import Console

        from belayer.cli.status_table import tables

        Console().print(tables(snapshot, limit))
