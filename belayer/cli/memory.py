"""`belayer memory`: the memory server of one device, which owns weights and KV cache, so that they outlive engines."""

from __future__ import annotations

import enum
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from belayer.cli import engine_options as options
from belayer.cli.options import OwnerPid
from belayer.errors import InputError

if TYPE_CHECKING:
    from belayer.gpu.wire import Status

HELP = """Run the memory server of a device, or say how the one that runs is.

`start` is the server itself: it runs until SIGTERM or the owner's end, and prints `ready` once its socket is there.
`belayer actors --engine sglang` starts one where none answers, so that `start` is only for those who want it apart.
`status` ends with 0 when engines can be served, with 1 when it is up but its weights are torn or its device is
unhealthy, with 2 when nobody answers.

Examples:

  belayer memory start --device cuda:0 --socket /run/belayer/gpu0.sock

  belayer memory status --socket /run/belayer/gpu0.sock --json
"""


class Action(enum.StrEnum):
    """What to do."""

    START = "start"
    STATUS = "status"


def memory(
    action: Annotated[Action, typer.Argument(help="start or status")],
    memory_socket: Annotated[
        Path | None,
        typer.Option("--socket", envvar="BELAYER_MEMORY_SOCKET", help="The server's Unix socket (mode 0600)."),
    ] = None,
    device: options.Device = "cpu",
    owner_pid: OwnerPid = None,
    hang_s: options.HangS = options.DEFAULT_HANG_S,
    hang_per_token_s: Annotated[
        float, typer.Option(help="And so much longer for each token of a prefill under way.", min=0.0)
    ] = 0.03,
    update_s: options.UpdateS = options.DEFAULT_UPDATE_S,
    sglang_python: options.SglangPython = None,
    rank: Annotated[
        int,
        typer.Option(
            help="Which tensor parallel rank's: for {rank} in the socket's path, and so many devices on from --device.",
            min=0,
        ),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
) -> None:
    from belayer.gpu.memory_process import MemoryProcess

    if memory_socket is None:
        raise InputError("no socket is named; give --socket, BELAYER_MEMORY_SOCKET or memory_socket in belayer.toml")
    server = MemoryProcess(device, memory_socket, os.getpid()).of_rank(rank)
    path, device = server.socket, server.device
    match action:
        case Action.START:
            hang = ("--hang-s", hang_s, "--hang-per-token-s", hang_per_token_s, "--update-s", update_s)
            _start(path, device, owner_pid, [str(word) for word in hang], sglang_python)
        case Action.STATUS:
            _status(path, as_json)


def _start(path: Path, device: str, owner_pid: int | None, hang: list[str], python: Path | None) -> None:
    """This process becomes the server."""
    from belayer.gpu.arena import device_index
    from belayer.gpu.errors import ArenaError
    from belayer.gpu.memory_process import ask_status

    program = sys.executable
    if device != "cpu":
        from belayer.gpu.sglang_cpu import need_python

        device_index(device)
        program = str(python or need_python())
    try:
        status = ask_status(path)
    except ArenaError:
        status = None
    if status is not None:
        raise InputError(f"a memory server for {status.device} answers at {path} already; end it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [program, "-m", "belayer.gpu.memory_main", "--device", device, "--socket", str(path)]
    command += ["--owner-pid", str(os.getpid() if owner_pid is None else owner_pid), "--ready-fd", "1"]
    command += hang
    sys.stdout.flush()
    os.execv(program, command)


def _status(path: Path, as_json: bool) -> None:
    import msgspec

    from belayer.gpu.memory_process import ask_status

    status = ask_status(path)
    good = not status.unhealthy and status.weights.state != "torn"
    if as_json:
        typer.echo(msgspec.json.encode({"good": good, **msgspec.to_builtins(status)}).decode())
    else:
        for line in _lines(status):
            typer.echo(line)
    raise typer.Exit(0 if good else 1)


def _lines(status: Status) -> list[str]:
    weights, arena = status.weights, status.arena
    written = f", begun by {weights.writer}" if weights.writer else ""
    lines = [
        f"device    {status.device}, {status.unhealthy or 'healthy'}",
        f"weights   {weights.state}, version {weights.version}{written}",
        f"KV cache  {f'{arena.size_bytes / 1e9:.3f} GB, {arena.spec}' if arena else 'not allocated yet'}",
        f"lease     epoch {status.epoch}, held by {status.holder or 'nobody'}",
    ]
    for engine in status.engines:
        place = "main" if engine.holds_arena else "shadow, armed" if engine.armed else "shadow, not armed yet"
        lines.append(f"engine    {engine.incarnation}, pid {engine.pid}, {place}")
    return lines
