"""`belayer publish`: a trainer's word that its engines have new weights."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer

from belayer.cli.options import AsJson, Namespace, Url, open_journal

HELP = """Say that a run's requests want weights of this version or newer.

Do it once the engines have been given them (SGLang's update_weights_from_... with that weight_version): the gateway
sends new requests only to engines that serve them. Which version an engine has is not said here: its host's actors hear
it from the memory server. Exit status 1: no worker of the run serves them yet, so that new requests wait.

Examples:

  belayer publish run-7 12

  belayer publish run-7 12 --url redis://journal:6379 --json
"""


def publish(
    run: Annotated[str, typer.Argument(help="The run.")],
    version: Annotated[int, typer.Argument(help="The weights' version.", min=0)],
    url: Url = None,
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    workers, behind = asyncio.run(_publish(run, version, url, namespace))
    if as_json:
        typer.echo(json.dumps({"run": run, "weight_version": version, "workers": workers, "behind": behind}))
    else:
        waiting = f"; older weights: {', '.join(behind)}" if behind else ""
        typer.echo(f"run {run} wants weights of version {version}{waiting}")
    raise typer.Exit(1 if len(behind) == len(workers) else 0)


async def _publish(run: str, version: int, url: str | None, namespace: str) -> tuple[list[str], list[str]]:
    from belayer.ids import checked_name
    from belayer.weights import publish_weights

    async with open_journal(url, namespace) as store:
        return await publish_weights(store, checked_name(run), version)
