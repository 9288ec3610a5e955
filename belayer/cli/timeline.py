"""`belayer timeline`: what happened to a trajectory, from a live journal or an exported file."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from belayer.cli.options import ArchiveUrl, AsJson, ExportFile, Namespace, Url, open_journal, unknown

if TYPE_CHECKING:
    from replay.timeline.model import Story

HELP = """Show what happened to a trajectory: turns, checkpoints, failures, recoveries, and what a rewind superseded.

In the terminal, or as one HTML file that opens anywhere. Encrypted commands show with the keys in
BELAYER_ENCRYPTION_KEYS.

Examples:

  belayer timeline django-11039 --url redis://journal:6379

  belayer timeline django-11039 --file night-run.journal --html django.html

  belayer timeline django-11039 --json | jq .items.incidents
"""


def timeline(
    trajectory: Annotated[str, typer.Argument(help="The trajectory, as `belayer status` names it.")],
    file: ExportFile = None,
    html: Annotated[Path | None, typer.Option(help="Write one HTML file instead.", dir_okay=False)] = None,
    url: Url = None,
    namespace: Namespace = "default",
    archive: ArchiveUrl = None,
    json: AsJson = False,
) -> None:
    name = trajectory.removeprefix("trajectory/")
    if file is not None:
        from belayer.journal.sealing import keyring_of
        from replay.timeline.source import from_file

        story = from_file(file, name, keyring_of(None))
    else:
        story = asyncio.run(_from_journal(name, url, namespace, archive))
    if html is not None:
        from replay.timeline.page import write_page

        write_page(story, html)
        sys.stdout.write(f"{html}\n")
    elif json:
        import msgspec

        told: dict[str, object] = msgspec.to_builtins(story)
        told["items"] = {"generations": story.generations, "actions": story.actions, "incidents": story.incidents}
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
    else:
        from rich.console import Console

        from replay.timeline.terminal import show

        show(story, Console())


async def _from_journal(name: str, url: str | None, namespace: str, archive: str | None) -> Story:
    from belayer import ids
    from belayer.journal.export import read_entries
    from replay.timeline.source import from_entries, tells_of

    async with open_journal(url, namespace, archive) as store:
        if await store.last(ids.trajectory(name)) is None:
            raise unknown(f"trajectory/{name}", await store.streams())
        streams = [stream for stream in await store.streams() if tells_of(stream, name)]
        entries = [(stream, entry) for stream in streams async for entry in read_entries(store, stream)]
        return from_entries(entries, name, store.keyring)
