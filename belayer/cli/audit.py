"""`belayer audit`: does the journal hang together? Exit status 0 clean, 1 findings, 2 what cannot be read."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING

import typer

from belayer.cli.options import ArchiveUrl, AsJson, ExportFile, Namespace, Url, open_journal

if TYPE_CHECKING:
    from replay.audit import Report

_PAGE = 500

HELP = """Check a journal or an exported file: sequences, digests, epochs, token chunks, boundaries, rewinds,
checkpoints and restores, each action once on the live branch.

Encrypted payloads are checked too with the keys in BELAYER_ENCRYPTION_KEYS; everything else needs none.

Exit status: 0 nothing found, 1 findings, 2 unreadable. docs/audit.md explains every check.

Examples:

  belayer audit --file night-run.journal

  belayer audit --url redis://journal:6379 --json
"""


def audit(
    file: ExportFile = None,
    url: Url = None,
    namespace: Namespace = "default",
    archive: ArchiveUrl = None,
    as_json: AsJson = False,
) -> None:
    from replay.audit import audit as audit_entries
    from replay.report import as_json as report_json
    from replay.report import show

    if file is not None:
        from belayer.journal.export import read_export
        from belayer.journal.sealing import keyring_of

        source, report = str(file), audit_entries(read_export(file), keyring_of(None))
    else:
        source, report = asyncio.run(_audit_live(url, namespace, archive))
    if as_json:
        sys.stdout.write(report_json(report, source) + "\n")
    else:
        from rich.console import Console

        show(report, source, Console())
    raise typer.Exit(1 if report.findings else 0)


async def _audit_live(url: str | None, namespace: str, archive: str | None) -> tuple[str, Report]:
    """Each stream as it is when its turn comes; the checks between streams allow for that."""
    from belayer.errors import CodecError
    from belayer.journal.writer import check_archived
    from replay.audit import JournalAudit
    from replay.stream_audit import StreamAudit

    started = time.perf_counter()
    journal = JournalAudit()
    async with open_journal(url, namespace, archive) as store:
        for stream in await store.streams():
            one = StreamAudit(stream, store.keyring)
            sequence, page = 0, _PAGE
            while True:
                try:
                    entries = await store.read(stream, sequence, page)
                except CodecError as error:
                    if page == 1:
                        one.unreadable(error.problem)
                        break
                    page = 1  # all that comes before it
                    continue
                if not entries:
                    break
                check_archived(stream, sequence, entries[0])
                one.feed((stream, entry) for entry in entries)
                sequence = entries[-1].last_sequence
            journal.add(one.close())
        return f"namespace {namespace}", journal.report(time.perf_counter() - started)
