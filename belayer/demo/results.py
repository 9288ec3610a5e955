"""What is left of a demo run: the exported journal, what its audit found, and a page for each run with failures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from belayer.demo.report import RunReport
from belayer.demo.stage import Stage
from belayer.journal.export import export_streams, read_export
from replay.audit import audit
from replay.timeline.page import write_page
from replay.timeline.source import from_file


async def audit_run(stage: Stage, folder: Path) -> tuple[Path, list[str], int]:
    """Export the journal and audit the export, as someone would who got only the file."""
    path = folder / "journal.belayer"
    await export_streams(stage.store, await stage.store.streams(), path)
    report = await asyncio.to_thread(lambda: audit(read_export(path)))
    return (
        path,
        [f"{one.stream} at {one.sequence}: {one.check}: {one.message}" for one in report.findings],
        report.events,
    )


def write_timelines(export: Path, run: str, runs: Sequence[RunReport]) -> list[Path]:
    """A page for each run with failures, beside the export."""
    pages: list[Path] = []
    for report in (report for report in runs if report.turns):
        page = export.with_name(f"{report.trajectory}.{_word(report.label)}.html")
        write_page(from_file(export, journal_name(report.trajectory, run, report.label)), page, _compared(report))
        pages.append(page)
    return pages


def _compared(report: RunReport) -> str:
    if report.equal:
        return (
            "Compared with an undisturbed run, its tokens, observations, files, processes and their memory are equal."
        )
    if report.problem:
        return f"The run failed: {report.problem}"
    return f"It differs from an undisturbed run: {'; '.join(map(str, report.differences))}"


def journal_name(trajectory: str, run: str, label: str) -> str:
    """What a run of a trajectory is called in the journal and in Docker: no two demos share a name."""
    return f"{trajectory}.{run}.{_word(label)}"


def _word(label: str) -> str:
    return label.replace(" ", "-")
