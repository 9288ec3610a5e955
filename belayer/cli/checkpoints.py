"""`belayer checkpoints`: what is kept on this host, what it takes, what is shared, and why it is kept."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from belayer.cli.options import AsJson, Namespace, Url, open_journal

if TYPE_CHECKING:
    from belayer.journal.store import JournalStore
    from belayer.sandbox.home import Home

HELP = """List the checkpoints on this host: what each holds, its size, what removing it would free, and why it is kept.

'size' counts all files of a checkpoint, 'alone' those that no other checkpoint has. Why one is kept is in the journal;
without one (--url) nothing is said about it. Nothing is changed.

Exit status: 0; with --verify 1 when a checkpoint is damaged.

Examples:

  belayer checkpoints

  belayer checkpoints --url redis://journal:6379 --trajectory django-11039 --json

  belayer checkpoints --verify
"""


def checkpoints(
    url: Url = None,
    namespace: Namespace = "default",
    trajectory: Annotated[str, typer.Option(help="Only this trajectory's.")] = "",
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and compare it with its digest.")] = False,
    as_json: AsJson = False,
) -> None:
    found = asyncio.run(_checkpoints(url, namespace, trajectory, verify))
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        _print(found, verify)
    raise typer.Exit(1 if any(row["damage"] for row in found["checkpoints"]) else 0)


async def _checkpoints(url: str | None, namespace: str, trajectory: str, verify: bool) -> dict[str, Any]:
    from belayer.errors import InputError
    from belayer.sandbox.home import Home, default_home
    from belayer.sandbox.usage import disk

    home = Home(default_home())
    try:
        found = disk(home)
    except PermissionError as error:
        raise InputError(f"{error.filename} is root's; run this as root") from None
    rows = [_row(home, name, verify) for name in found.checkpoints]
    # One that was removed while we looked is not damaged.
    rows = [
        row for row in rows if trajectory in ("", row["trajectory"]) and home.checkpoint(row["checkpoint"]).exists()
    ]
    if url:
        async with open_journal(url, namespace) as store:
            for row in rows:
                row["why"] = await _why(store, row["trajectory"], row["checkpoint"])
    for row in rows:
        usage = found.checkpoints[row["checkpoint"]]
        row["bytes"], row["alone_bytes"] = usage.bytes, usage.alone_bytes
    return {
        "checkpoints": rows,
        "logical_bytes": sum(usage.bytes for usage in found.checkpoints.values()),
        "disk_bytes": found.bytes,
        "blobs": found.blobs,
        "blobs_bytes": found.blobs_bytes,
        "unheld_bytes": found.unheld_bytes,
    }


def _row(home: Home, name: str, verify: bool) -> dict[str, Any]:
    import msgspec

    from belayer.errors import RestoreFailedError
    from belayer.sandbox.manifest import read_manifest
    from belayer.sandbox.manifest import verify as verify_bytes

    row: dict[str, Any] = {"checkpoint": name, "trajectory": "", "run": "", "action": None, "processes": False}
    row |= {"left_out": [], "not_captured": (), "age_s": 0.0, "why": "", "damage": ""}
    folder = home.checkpoint(name)
    try:
        manifest = read_manifest(folder)
        row |= {"trajectory": manifest.trajectory, "run": manifest.run, "action": manifest.action}
        row |= {"processes": not manifest.quiet, "age_s": round(time.time() - manifest.created_at_s, 1)}
        row["not_captured"] = manifest.not_captured
        row["left_out"] = [msgspec.structs.asdict(one) for one in manifest.left_out]
        if verify:
            verify_bytes(folder, manifest, thorough=True)
    except RestoreFailedError as error:
        row["damage"] = error.cause
    return row


async def _why(store: JournalStore, trajectory: str, checkpoint: str) -> str:
    """What the journal knows of the checkpoint's use."""
    from belayer import ids
    from belayer.actors.checkpointer import KEPT_CHECKPOINTS
    from belayer.actors.sandboxes import look
    from belayer.journal.writer import Reader
    from belayer.projections.plan import disposable, newest_checkpoint
    from belayer.projections.trajectory import fold

    if not trajectory:
        return "its manifest does not say whose it is"
    box = await look(store, trajectory)
    prefix = fold(await Reader(store, ids.trajectory(trajectory), from_mark=True).catch_up())
    if box.phase == "none":
        return "this journal does not know it"
    if prefix.phase in ("finished", "aborted") or box.phase == "removed":
        return "not needed: its trajectory has ended; the reaper removes it"
    if checkpoint not in box.published:
        return "not needed: never published, or discarded; it goes with its trajectory"
    if checkpoint == newest_checkpoint(prefix, box)[0]:
        return "the newest on the live branch: what recovery restores"
    if checkpoint in disposable(prefix, box, KEPT_CHECKPOINTS):
        return "not needed: the next checkpoint removes it"
    return "should the newest one fail"


def _print(found: dict[str, Any], verified: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from replay.rows import Rows

    console = Console()
    columns = ("checkpoint", ">action", ">age", "processes", ">size", ">alone", "~why it is kept")
    table = Rows(*columns, title="Checkpoints on this host")
    for row in found["checkpoints"]:
        remark = Text(f"damaged: {row['damage']}", "bold red") if row["damage"] else Text(row["why"])
        if row["left_out"]:
            remark.append(f"\nfiles alone, without {', '.join(one['what'] for one in row['left_out'])}", "yellow")
        if row["not_captured"]:
            remark.append(f"\nwithout the contents of {', '.join(row['not_captured'])}", "yellow")
        table.add(
            row["checkpoint"],
            "?" if row["action"] is None else str(row["action"]),
            f"{row['age_s']:.0f} s",
            "yes" if row["processes"] else "no",
            _size(row["bytes"]),
            _size(row["alone_bytes"]),
            remark,
        )
    console.print(table if found["checkpoints"] else Text("There are no checkpoints on this host.", "dim"))
    blobs, unheld = _size(found["blobs_bytes"]), _size(found["unheld_bytes"])
    console.print(
        f"All together {_size(found['logical_bytes'])}, on the disk {_size(found['disk_bytes'])}; "
        f"{found['blobs']} blobs of {blobs}, {unheld} of it held by nobody."
    )
    if verified and not any(row["damage"] for row in found["checkpoints"]):
        console.print("Every byte is what its digest says.")


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MB"
