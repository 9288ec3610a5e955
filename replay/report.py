"""An audit's report for people (a rich table) and for programs (one JSON object)."""

from __future__ import annotations

from itertools import groupby

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from replay.audit import Report


def as_json(report: Report, source: str) -> str:
    """One line: findings, counts, seconds, and what was audited."""
    return msgspec.json.encode({"source": source, **msgspec.to_builtins(report)}).decode()


def show(report: Report, source: str, console: Console) -> None:
    """The findings as a table under each stream's name, then one line that sums up."""
    for stream, findings in groupby(report.findings, key=lambda finding: finding.stream):
        table = Table(title=stream, title_justify="left", title_style="bold")
        table.add_column("sequence", justify="right", no_wrap=True)
        table.add_column("check", style="bold red", no_wrap=True)
        table.add_column("what is wrong", overflow="fold")
        for finding in findings:
            table.add_row(str(finding.sequence), finding.check, Text(finding.message))
        console.print(table)
    for stream in report.unpaired:
        console.print(Text(f"{stream}: its trajectory is not here; the checks between the two were left out", "yellow"))
    for key, count in report.sealed.items():
        told = f"{count} payloads are sealed with key {key}, which is not here: what is in them was not checked"
        console.print(Text(told, "yellow"))
    console.print(_summary(report, source), soft_wrap=True)


def _summary(report: Report, source: str) -> Text:
    streams = ", ".join(f"{count} {kind}" for kind, count in report.streams.items()) or "no streams"
    number = len(report.findings)
    found = "no findings" if number == 0 else f"{number} finding{'s' if number > 1 else ''}"
    text = Text(f"{source}: {streams}; {report.events} events audited in {report.seconds:.2f} s: ")
    return text.append(found, "bold red" if number else "bold green")
