"""The command `belayer`.

Exit status: 0 done; 1 the verb's own 'no' (findings, differences); 2 something that a person can put right, said in one
line on stderr and, with --json, in one object on stdout; 130 after Ctrl-C, once what was begun is cleaned up; 141 when
whoever read stdout went away (`| head`). A traceback always means a bug of ours. docs/cli.md is for those who call it
from programs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from belayer import __version__
from belayer.cli.settings import defaults, read_settings, set_home
from belayer.cli.verbs import VERBS, LazyGroup, missing
from belayer.errors import BelayerError
from belayer.exits import INTERRUPTED, USAGE, guarded

_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]
"""What click (typer's own, or the package, by typer's version) raises on a wrong command line."""

app = typer.Typer(
    name="belayer",
    cls=LazyGroup,
    help="Belayer keeps long agentic-RL rollouts alive: it journals what happened and recovers by reading it back.",
    epilog="Settings: belayer.toml or --config FILE, then BELAYER_... variables, then flags. "
    "Exit status: 0 done, 1 findings or differences, 2 an error to put right, 130 interrupted.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"belayer {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="Settings file; without it belayer.toml, if there is one.", dir_okay=False)
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    settings = read_settings(config)
    set_home(settings)
    context.default_map = dict(defaults(settings, VERBS))
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _placeholder() -> None:
    """Stands for a verb in the list of verbs."""


for _verb, _summary in VERBS.items():
    app.command(_verb, help=_summary)(_placeholder)


def run(arguments: list[str] | None = None) -> int:
    """Run one command line; its exit status. What goes wrong is said on stderr, in one line."""
    given = sys.argv[1:] if arguments is None else arguments
    return guarded("belayer", lambda: _run(given))


def _run(given: list[str]) -> int:
    try:
        status = app(given, prog_name="belayer", standalone_mode=False)
    except BelayerError as error:
        return _say(error, str(error), given)
    except ModuleNotFoundError as error:
        known = missing(error, " ".join(given[:1]))
        if known is error:
            raise
        return _say(known, str(known), given)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except _USAGE_ERROR as error:
        problem = error.format_message() if hasattr(error, "format_message") else str(error)  # type: ignore[attr-defined]
        context = getattr(error, "ctx", None)
        command = "belayer" if context is None else context.command_path
        return _say(error, f"{problem.rstrip('.')}; see `{command} --help`", given)
    return status if isinstance(status, int) else 0


def _say(error: Exception, problem: str, given: Sequence[str]) -> int:
    """One line for people; for programs that asked for JSON an object too, since they wait for one."""
    line = " ".join(problem.split())
    sys.stderr.write(f"belayer: {line}\n")
    if "--json" in given:
        import json

        sys.stdout.write(json.dumps({"error": {"type": type(error).__name__, "message": line}}) + "\n")
    return USAGE
