"""The command `belayer`. Every error that we mean is one line on stderr and exit code 2; a traceback is a bug of ours.

Verbs import what they need when they run, so that `belayer --help` is quick and needs no extra.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from belayer import __version__
from belayer.cli import actors, doctor, restore
from belayer.errors import BelayerError

app = typer.Typer(
    name="belayer",
    help="Event-sourced recovery for LLM agentic RL.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("actors", help=actors.HELP)(actors.actors)
app.command("doctor")(doctor.doctor)
app.command("restore", help=restore.HELP)(restore.restore)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"belayer {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


def main() -> None:
    """The console script."""
    try:
        app()
    except BelayerError as error:
        print(f"belayer: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
