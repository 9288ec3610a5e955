"""`belayer doctor`: what this machine can do, and for each 'no' what to do about it.

Exit status 0 when the main job can run here (every finding that it needs is good), 1 otherwise. It fails on nothing:
what cannot be found out is a finding too (see `belayer.cli.probes`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import msgspec
import typer

from belayer.cli.probes import PROBES, Finding

HELP = """Say what this machine can do, and for each 'no' what to do about it.

Exit status 0 when the main job can run here, 1 otherwise.

Examples:

  belayer doctor

  belayer doctor --json
"""


def examine() -> list[Finding]:
    """Every probe's finding, in the table's order; the probes run side by side."""
    with ThreadPoolExecutor(max_workers=len(PROBES)) as pool:
        return list(pool.map(lambda probe: probe(), PROBES))


def ready(findings: list[Finding]) -> bool:
    """Whether the main job can run here."""
    return all(finding.ok for finding in findings if finding.needed)


def doctor(json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    findings = examine()
    if json:
        typer.echo(msgspec.json.encode({"ready": ready(findings), "findings": findings}).decode())
    else:
        _print_table(findings)
    raise typer.Exit(0 if ready(findings) else 1)


def _print_table(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.text import Text

    from replay.rows import Rows

    table = Rows("what", "is there", "~found", "~what to do", title="What this machine can do")
    for finding in findings:
        mark = Text("yes", "green") if finding.ok else Text("no", "bold red" if finding.needed else "yellow")
        table.add(finding.name, mark, finding.detail, finding.remedy)
    console = Console()
    console.print(table)
    missing = ", ".join(finding.name for finding in findings if finding.needed and not finding.ok)
    console.print(Text(f"The main job cannot run here yet: {missing}." if missing else "The main job can run here."))
