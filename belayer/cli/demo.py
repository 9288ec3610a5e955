"""`belayer demo`: recorded agents in real containers, killed and brought back; exit code 1 if anything differs."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from belayer.cli.engine_options import Kind
from belayer.errors import InputError

HELP = """Replay recorded agents in real containers and kill engines, containers, actors and Redis under them.

Each trajectory runs undisturbed first, then with failures at seeded random instants; each run must end in the same
state: tokens, observations, files, processes. Needs root, Docker and CRIU (`make setup`; `belayer doctor` tells).

Examples:

  belayer demo

  belayer demo --seed 7 --failures engine,container-checkpoint --json

  belayer demo --trajectories ~/my-runs --runs 1

  belayer demo --trajectories examples/trajectories/django__django-11039.traj.json --runs 1

  belayer demo --engine sglang --runs 1

With --engine sglang a real SGLang on the CPU (scripts/sglang_cpu.sh) computes every token, with a small model whose
words mean nothing: each turn is as long as the recorded one (at most 64 tokens), and the recorded commands are run.
"""

T = TypeVar("T")
_SHIPPED = Path(__file__).resolve().parents[2] / "examples" / "trajectories"


def demo(
    trajectories: Annotated[
        Path,
        typer.Option(
            help="Folder of mini-swe-agent's .traj.json files, or one such file.", show_default="the shipped ones"
        ),
    ] = _SHIPPED,
    failures: Annotated[
        str,
        typer.Option(
            help="Failures in each run: a number, or kinds separated by commas (engine, container-idle, "
            "container-action, container-checkpoint, recovery, redis, publish)."
        ),
    ] = "6",
    runs: Annotated[int, typer.Option(help="Runs with failures of each trajectory.", min=0)] = 2,
    seed: Annotated[int, typer.Option(help="Decides when failures strike.")] = 1,
    engine: Annotated[Kind, typer.Option(help="The recorded engine, or a real SGLang on the CPU.")] = Kind.RECORDED,
    tokens_per_s: Annotated[float, typer.Option(help="How fast the recorded engine generates.", min=1.0)] = 400.0,
    results: Annotated[
        Path | None, typer.Option(help="Folder for exported journals and timelines.", show_default="in /tmp")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the run's folder: logs and the journal's data.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Only one JSON object on standard output.")] = False,
) -> None:
    import logging

    from rich.console import Console

    from belayer.cli.log import configure_log
    from belayer.demo.board import LiveBoard, show
    from belayer.demo.failures import parse_kinds
    from belayer.demo.run import Options, run_demo

    if trajectories == _SHIPPED and not _SHIPPED.is_dir():
        raise InputError(
            "the recorded trajectories are in Belayer's repository, not in the installed package; "
            "give your own with --trajectories, or run `make demo` in a checkout"
        )
    chosen = Options(
        trajectories,
        tuple(parse_kinds(failures)),
        runs=runs,
        seed=seed,
        engine=engine.value,
        tokens_per_s=tokens_per_s,
        keep=keep,
    )
    if results is not None:
        chosen = replace(chosen, results=results)
    # That rollouts are fenced off and wait is what the demo is about: the board shows it.
    configure_log(logging.WARNING)
    console = Console(stderr=as_json)
    with LiveBoard(console) as board:
        report = asyncio.run(until_stopped(run_demo(chosen, board)))
    show(report, console)
    if as_json:
        sys.stdout.write(json.dumps(report.as_json()) + "\n")
    raise typer.Exit(0 if report.good else 1)


async def until_stopped(work: Coroutine[Any, Any, T]) -> T:
    """Ctrl-C and SIGTERM end the work by cancelling it, so that everything it made is removed."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
