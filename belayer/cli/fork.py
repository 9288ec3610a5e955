"""`belayer fork`: several running copies of a checkpoint, for tree search, best-of-n, or a look at what went wrong."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from belayer.cli.options import AsJson, Namespace, Url, open_journal

if TYPE_CHECKING:
    from belayer.journal.store import JournalStore
    from belayer.sandbox.docker_host import DockerHost

HELP = """Make running copies of a checkpoint; a trajectory's name means its newest one. The original goes on.

All copies are made, or none. Each is a container of its own, in which `docker exec` works and code attaches with
SandboxHost.attach; nothing in it tells that it is a copy. No journal is kept of copies: they are removed with the run
(--run, or that of the original), or with `docker rm -f`. Of a checkpoint that holds files alone (`belayer actors
--fallback files`) the copies have no processes; what they lack is said, or refused with --whole (exit status 2).

Examples:

  belayer fork django-11039 --n 3

  belayer fork django-11039-b12-e14 --n 8 --run search-7 --url redis://journal:6379 --json
"""


def fork(
    name: Annotated[str, typer.Argument(help="A checkpoint or a trajectory.", metavar="CHECKPOINT|TRAJECTORY")],
    n: Annotated[int, typer.Option("--n", "-n", min=1, max=64, help="How many copies.")] = 1,
    run: Annotated[str, typer.Option(help="The run that the copies belong to; without it the original's.")] = "",
    whole: Annotated[bool, typer.Option("--whole", help="Not of a checkpoint that holds files alone.")] = False,
    url: Url = None,
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    outcome = asyncio.run(_fork(name, n, run, whole, url, namespace))
    if as_json:
        sys.stdout.write(json.dumps(outcome) + "\n")
        return
    sys.stdout.write(f"{outcome['checkpoint']}, after action {outcome['action']}:\n")
    for copy in outcome["copies"]:
        sys.stdout.write(f"  {copy['name']}\n")
    if outcome["left_out"]:
        gone = ", ".join(one["what"] for one in outcome["left_out"])
        sys.stdout.write(f"not in them, for the checkpoint holds files alone: {gone}\n")
    sys.stdout.write(f"they are removed with run {outcome['run']}\n")


async def _fork(name: str, count: int, run: str, whole: bool, url: str | None, namespace: str) -> dict[str, Any]:
    from dataclasses import asdict

    import msgspec

    from belayer import ids
    from belayer.actors.sandboxes import look
    from belayer.errors import InputError
    from belayer.sandbox.docker_host import open_host
    from belayer.sandbox.fork import fork as fork_checkpoint

    async with open_journal(url, namespace) as store, open_host(spares=0) as host:
        trajectory, checkpoint, action = await _find(store, host, ids.checked_made_name(name))
        box = await look(store, trajectory)
        assert box.spec is not None, "a sandbox with checkpoints has been created"
        left_out = box.published[checkpoint].left_out
        if whole and left_out:
            raise InputError(
                f"{checkpoint} holds files alone, without {left_out[0].what}; leave out --whole, or fork another "
                "(`belayer checkpoints`)"
            )
        series = ids.new_suffix()
        copies = {f"{trajectory}.{series}-{k}": f"belayer-{trajectory}.{series}-{k}" for k in range(1, count + 1)}
        made = await fork_checkpoint(host, run or box.run, checkpoint, action, box.spec, copies)
    return {
        "checkpoint": checkpoint,
        "action": action,
        "run": run or box.run,
        "left_out": [msgspec.structs.asdict(one) for one in left_out],
        "copies": [{"trajectory": of, **asdict(incarnation)} for of, incarnation in made.items()],
    }


async def _find(store: JournalStore, host: DockerHost, name: str) -> tuple[str, str, int]:
    """The trajectory, its checkpoint, and the newest action that it holds; of a trajectory's name the newest one."""
    from belayer import ids
    from belayer.actors.sandboxes import look
    from belayer.errors import InputError, RestoreFailedError
    from belayer.journal.writer import Reader
    from belayer.projections.plan import newest_checkpoint
    from belayer.projections.trajectory import fold
    from belayer.sandbox.manifest import read_manifest

    box = await look(store, name)
    if box.phase != "none":
        prefix = fold(await Reader(store, ids.trajectory(name), from_mark=True).catch_up())
        checkpoint, boundary = newest_checkpoint(prefix, box)
        if not checkpoint:
            raise InputError(f"trajectory {name} has no checkpoint yet; its first one is made after an action")
        return name, checkpoint, boundary.number
    try:
        manifest = read_manifest(host.checkpoint_path(name))
    except RestoreFailedError:
        raise InputError(f"{name} is no trajectory of this journal and no checkpoint on this host") from None
    box = await look(store, manifest.trajectory)
    held = [boundary.number for checkpoint, boundary in box.held if checkpoint == name]
    if not held:
        raise InputError(f"the journal does not call {name} published; fork another (`belayer checkpoints`)")
    return manifest.trajectory, name, held[-1]
