"""`belayer status`: every trajectory, worker and run of a journal, as their streams say it now. Takes no epoch."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from belayer.cli.options import AsJson, Namespace, Url, open_journal

if TYPE_CHECKING:
    from belayer.cli.status_rows import Board, Snapshot

HELP = """Show every trajectory, worker and run of a journal: where it stands, who holds it, how old its last event is.

At the end: which acknowledged events a server was found to have lost, and whether they are stored again.

Examples:

  belayer status --url redis://journal:6379

  belayer status --watch

  belayer status --json | jq '.trajectories[] | select(.state == "recovering")'

  belayer status --json | jq '.losses[] | select(.stored_again | not)'
"""


def status(
    url: Url = None,
    namespace: Namespace = "default",
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again and again until Ctrl-C.")] = False,
    every_s: Annotated[float, typer.Option("--every", help="Seconds between two looks of --watch.", min=0.1)] = 1.0,
) -> None:
    asyncio.run(_status(url, namespace, as_json, watch, every_s))


async def _status(url: str | None, namespace: str, as_json: bool, watch: bool, every_s: float) -> None:
    from belayer.cli.status_rows import Board

    async with open_journal(url, namespace) as store:
        board = Board(store)
        if watch:
            await (_print_each(board, every_s) if as_json else _watch(board, every_s))
        else:
            _print(await board.look(time.time_ns()), as_json)


async def _watch(board: Board, every_s: float) -> None:
    from rich.live import Live

    from belayer.cli.status_table import tables

    with Live(auto_refresh=False, screen=sys.stdout.isatty()) as live:
        while True:
            live.update(tables(await board.look(time.time_ns())), refresh=True)
            await asyncio.sleep(every_s)


async def _print_each(board: Board, every_s: float) -> None:
    while True:
        _print(await board.look(time.time_ns()), as_json=True)
        await asyncio.sleep(every_s)


def _print(snapshot: Snapshot, as_json: bool) -> None:
    if as_json:
        import msgspec

        sys.stdout.write(msgspec.json.encode(snapshot).decode() + "\n")
        sys.stdout.flush()
    else:
        from rich.console import Console

        from belayer.cli.status_table import tables

        Console().print(tables(snapshot))
