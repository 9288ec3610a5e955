"""`belayer shadow`: see to it that a worker has a standby, and say what the standby costs."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from belayer.cli import engine_options as options
from belayer.cli.options import AsJson, Namespace, Url, open_journal
from belayer.errors import InputError

if TYPE_CHECKING:
    from belayer.journal.store import JournalStore
    from belayer.projections.worker import WorkerState

HELP = """Arm a shadow for a worker, unless it has one, and report the shadow's memory.

The actors do this by themselves after every handover; the verb is for looking, and for a worker whose actors are away.
The shadow ends with its run's owner. Exit status 1: the worker has no main that a shadow could take over.

Examples:

  belayer shadow w0 --engine sglang --device cuda:0 --memory-socket /run/belayer/gpu0.sock \\
      --engine-log /var/log/engines --sglang-arguments "--model-path /models/qwen3-4b"

  belayer shadow w0 --engine-log /var/log/engines --recordings ./recordings --json
"""


def shadow(
    worker: Annotated[str, typer.Argument(help="The worker's name.")],
    engine_log: options.EngineLog,
    url: Url = None,
    namespace: Namespace = "default",
    owner_pid: Annotated[
        int | None, typer.Option(help="The shadow ends with this process.", show_default="the run's owner")
    ] = None,
    engine: options.EngineOption = options.Kind.RECORDED,
    recordings: options.Recordings = None,
    tokens_per_s: options.TokensPerS = 400.0,
    sglang_python: options.SglangPython = None,
    sglang_arguments: options.SglangArguments = "",
    memory_socket: options.MemorySocket = None,
    device: options.Device = "cpu",
    as_json: AsJson = False,
) -> None:
    chosen = options.Choice(
        engine, engine_log, recordings, tokens_per_s, sglang_python, sglang_arguments, memory_socket, device
    )
    report = asyncio.run(_run(chosen, url, namespace, worker, owner_pid))
    if report is None:
        typer.echo(json.dumps({"worker": worker, "shadow": None}) if as_json else f"{worker} has no serving main")
        raise typer.Exit(1)
    typer.echo(json.dumps(report) if as_json else _sentence(report))


async def _run(
    chosen: options.Choice, url: str | None, namespace: str, worker: str, owner_pid: int | None
) -> dict[str, Any] | None:
    from belayer.actors.worker_recovery import WorkerRecovery, look
    from belayer.gpu.usage import device_bytes, host_bytes
    from belayer.processes import host_name

    async with open_journal(url, namespace) as store:
        state = await look(store, worker)
        if state.serving is None:
            return None
        began_s = time.monotonic()
        armed = state.shadow is None
        if armed:
            owner = owner_pid or await _owner(store, state)
            recovery = WorkerRecovery(store, chosen.host(owner), host_name(), "belayer shadow")
            await recovery.recover(worker)
            state = await look(store, worker)
        if state.shadow is None:
            return None
        pid = state.shadow.registered.pid
        return {
            "worker": worker,
            "shadow": state.shadow.registered.incarnation,
            "pid": pid,
            "armed_now": armed,
            "took_s": round(time.monotonic() - began_s, 3),
            "host_bytes": await asyncio.to_thread(host_bytes, pid),
            "device_bytes": await asyncio.to_thread(device_bytes, pid),
        }


async def _owner(store: JournalStore, state: WorkerState) -> int:
    """The process that the worker's run belongs to: its engines end with it."""
    from belayer import ids
    from belayer.journal.events import RunStarted
    from belayer.journal.writer import Reader
    from belayer.processes import host_name, is_alive

    for recorded in await Reader(store, ids.run(state.run)).catch_up():
        event = recorded.event
        if not isinstance(event, RunStarted) or event.host != host_name():
            continue
        if is_alive(event.owner_pid, event.owner_start_ticks):
            return event.owner_pid
    raise InputError(f"run {state.run} has no living owner on this host; name one with --owner-pid")


def _sentence(report: dict[str, Any]) -> str:
    what = f"armed in {report['took_s']:.1f} s" if report["armed_now"] else "armed already"
    device = report["device_bytes"]
    memory = f"{report['host_bytes'] / 1e9:.2f} GB of the host's memory"
    if device is not None:
        memory += f", {device / 1e9:.2f} GB of the device's"
    return f"{report['worker']}: shadow {report['shadow']} (pid {report['pid']}) {what}; {memory}"
