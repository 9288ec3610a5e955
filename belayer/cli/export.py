"""`belayer export`: streams as they are now, in one file that needs no server. Half a file is never left."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from belayer.cli.options import ArchiveUrl, AsJson, Namespace, Url, find_streams, open_journal
from belayer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from belayer.ids import StreamId
    from belayer.journal.store import JournalStore

HELP = """Copy streams of a journal to a file, which `belayer audit --file` and `belayer timeline --file` read.

The file appears under its name only when it is complete and on disk. A bare name means all streams of that name (a
trajectory and its sandbox); no name at all means the whole journal.

Examples:

  belayer export --out night-run.journal

  belayer export --out one.journal django-11039 worker/w0 --json
"""


def export(
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.", dir_okay=False)],
    streams: Annotated[list[str] | None, typer.Argument(help="kind/name, or a bare name.")] = None,
    url: Url = None,
    namespace: Namespace = "default",
    archive: ArchiveUrl = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if there is one.")] = False,
    json: AsJson = False,
) -> None:
    if out.exists() and not force:
        raise InputError(f"{out} exists; choose another name, or --force to replace it")
    try:
        entries, count = asyncio.run(_export(out, streams or [], url, namespace, archive))
    except OSError as error:
        if error.errno is None:
            raise
        raise InputError(f"cannot write {out}: {error.strerror or error}; nothing of it was left") from None
    size_bytes = out.stat().st_size
    if json:
        import msgspec

        done = {"file": str(out), "streams": count, "entries": entries, "size_bytes": size_bytes}
        sys.stdout.write(msgspec.json.encode(done).decode() + "\n")
    else:
        sys.stdout.write(f"{out}: {count} streams, {entries} entries, {size_bytes / 1e6:.1f} MB\n")


async def _export(
    out: Path, wanted: Sequence[str], url: str | None, namespace: str, archive: str | None
) -> tuple[int, int]:
    """How many entries of how many streams were written."""
    async with open_journal(url, namespace, archive) as store:
        streams = await find_streams(store, wanted)
        return await _copy(store, streams, out), len(streams)


async def _copy(store: JournalStore, streams: Sequence[StreamId], out: Path) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from belayer.journal.export import ExportWriter, read_entries

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("streams"))
    console = Console(stderr=True)
    shown = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    entries = 0
    with ExportWriter(out) as writer, shown as progress:
        task = progress.add_task("exporting", total=len(streams))
        for stream in streams:
            progress.update(task, description=f"exporting {stream}")
            async for entry in read_entries(store, stream):
                writer.add(stream, entry)
                entries += 1
            progress.advance(task)
    return entries
