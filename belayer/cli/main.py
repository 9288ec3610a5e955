"""The command `belayer`.

Exit status: 0 done; 1 the verb's own 'no' (findings, differences); 2 something that a person can put right, said in one
line on stderr; 130 after Ctrl-C, once what was begun is cleaned up. A traceback always means a bug of ours.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from belayer import __version__
from belayer.cli import INTERRUPTED
from belayer.cli.settings import defaults, read_settings, set_home
from belayer.cli.verbs import VERBS, LazyGroup, missing
from belayer.errors import BelayerError

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
    try:
        status = app(arguments, prog_name="belayer", standalone_mode=False)
    except BelayerError as error:
        return _say(str(error))
    except ModuleNotFoundError as error:
        known = missing(error, " ".join((arguments or sys.argv[1:])[:1]))
        if known is error:
            raise
        return _say(str(known))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except _USAGE_ERROR as error:
        problem = error.format_message() if hasattr(error, "format_message") else str(error)  # type: ignore[attr-defined]
        return _say(f"{problem.rstrip('.')}; see `belayer --help` and `belayer VERB --help`")
    return status if isinstance(status, int) else 0


def _say(problem: str) -> int:
    sys.stderr.write(f"belayer: {' '.join(problem.split())}\n")
    return 2
