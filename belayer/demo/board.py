"""Shows a demo run: live progress while it goes, tables at its end. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from belayer.demo.left_out import everything
from belayer.demo.report import DemoReport, RunReport
from belayer.demo.view import View
from replay.rows import Rows
from replay.timeline.words import plural

_BAR_WIDTH = 24
_REFRESHES_PER_S = 4
_SHOWN_DIFFERENCES = 12


@dataclass(slots=True)
class _Row:
    trajectory: str
    label: str
    turns: int
    view: View
    struck: Callable[[], int]
    failures: int
    report: RunReport | None = None


class LiveBoard:
    """`with LiveBoard(console) as board:`. On a console that is no terminal each step and each end is one line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: list[_Row] = []
        self._step = "starting"
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=_REFRESHES_PER_S)

    def __enter__(self) -> LiveBoard:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def step(self, text: str) -> None:
        self._step = text
        if not self._console.is_terminal:
            self._console.print(text, highlight=False)

    def row(
        self, trajectory: str, label: str, turns: int, view: View, struck: Callable[[], int], failures: int
    ) -> None:
        self._rows.append(_Row(trajectory, label, turns, view, struck, failures))

    def done(self, report: RunReport) -> None:
        for row in self._rows:
            if (row.trajectory, row.label) == (report.trajectory, report.label):
                row.report = report
        if not self._console.is_terminal:
            self._console.print(
                f"{report.trajectory} {report.label}: {_result(report)}, {report.turns} turns, "
                f"{len(report.recoveries)} failures, {report.wall_s:.1f} s",
                highlight=False,
            )

    def _render(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        for row in self._rows:
            table.add_row(*_progress(row))
        return Group(table, Text(f"{self._step} ...", style="dim"))


def _progress(row: _Row) -> tuple[RenderableType, ...]:
    state = row.view.trajectory
    said = state.generations
    filled = min(_BAR_WIDTH, _BAR_WIDTH * said // max(1, row.turns))
    bar = Text("━" * filled, style="green") + Text("━" * (_BAR_WIDTH - filled), style="dim")
    kills = f"{row.struck()}/{row.failures} kills" if row.failures else ""
    now = Text(_now(row.view), style="yellow" if state.phase == "recovering" else "")
    if row.report is not None:
        now = Text(f"{_result(row.report)} after {row.report.wall_s:.1f} s", style=_style(row.report))
    return row.trajectory, row.label, bar, f"turn {said}/{row.turns}", kills, now


def _now(view: View) -> str:
    state = view.trajectory
    if state.phase == "empty":
        return "waiting"
    if state.phase == "recovering" or view.sandbox.phase in ("failed", "recovering"):
        return f"recovering {view.sandbox.incarnation.rpartition('-')[2]}"
    if state.action is not None:
        return f"action {state.action.action}"
    if state.generation is not None:
        return f"generating, {state.generation.count} tokens"
    return state.phase


def show(report: DemoReport, console: Console) -> None:
    """What was not compared, then the tables; the verdict and what to look at next are last, for they stay in sight."""
    for rows in (_left_out(), _runs(report), *([_recoveries(report)] if report.recoveries else [])):
        console.print(rows)
        console.print()
    for run in report.runs:
        for difference in run.differences[:_SHOWN_DIFFERENCES]:
            console.print(f"[red]differs[/] {run.trajectory} {run.label}: ", end="")
            console.print(str(difference), highlight=False, markup=False)
        if len(run.differences) > _SHOWN_DIFFERENCES:
            console.print(f"... and {len(run.differences) - _SHOWN_DIFFERENCES} more differences in this run")
        if run.problem:
            console.print(f"[red]failed[/] {run.trajectory} {run.label}: ", end="")
            console.print(run.problem, highlight=False, markup=False)
        for planned in run.missed:
            console.print(f"[yellow]missed[/] {run.trajectory} {run.label}: {planned.kind} found no instant to strike")
    for finding in report.findings:
        console.print("[red]audit[/] ", end="")
        console.print(finding, highlight=False, markup=False)
    verdict = "[green]all equal[/]" if report.good else "[bold red]not all is well[/]"
    console.print(
        f"{verdict}: {plural(len(report.recoveries), 'failure')} ({len(report.missed)} missed) in "
        f"{plural(len(report.runs), 'run')} of {_trajectories(report)}, {plural(len(report.findings), 'finding')} in "
        f"{report.events:,} audited events, "
        f"seed {report.seed}, {report.wall_s:.0f} s",
        highlight=False,
    )
    places = [
        ("What happened, to open in a browser:", report.timelines),
        ("Its journal, for `belayer audit --file` and `belayer timeline TRAJECTORY --file`:", [report.export]),
        ("The run's folder, kept:", [report.kept]),
    ]
    for what, paths in places:
        if any(paths):
            console.print(f"\n{what}", highlight=False)
        for path in filter(None, paths):
            console.print(f"  {path}", highlight=False, soft_wrap=True)


def _trajectories(report: DemoReport) -> str:
    count = len(report.trajectories)
    return "1 trajectory" if count == 1 else f"{count} trajectories"


def _runs(report: DemoReport) -> Rows:
    columns = ("trajectory", "run", ">turns", ">kills", ">tokens again", ">actions again", ">wall", "end state")
    table = Rows(*columns, title="Runs")
    for run in report.runs:
        table.add(
            run.trajectory,
            run.label,
            str(run.turns),
            str(len(run.recoveries)) if run.label.startswith("failures") else "",
            str(run.cost.tokens_again),
            str(run.cost.actions_again),
            f"{run.wall_s:.0f} s",
            Text(_result(run), style=_style(run)),
        )
    return table


def _recoveries(report: DemoReport) -> Rows:
    """Medians, and the worst."""
    columns = ("killed", ">times", ">it was detected", ">replaced", ">the run went on", ">at worst")
    table = Rows(*columns, title="Time from the kill until ...")
    for kind, recoveries in sorted(report.by_kind.items()):
        table.add(
            kind,
            str(len(recoveries)),
            _median([recovery.detected_s for recovery in recoveries]),
            _median([recovery.recovered_s for recovery in recoveries]),
            _median([recovery.resumed_s for recovery in recoveries]),
            _worst([recovery.resumed_s for recovery in recoveries]),
        )
    return table


def _left_out() -> Rows:
    table = Rows("~not compared", "~why", title="What the comparison leaves out")
    for left_out in everything():
        table.add(Text(left_out.what, "dim"), Text(left_out.reason, "dim"))
    return table


def _median(values: list[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    return f"{known[len(known) // 2]:.2f} s" if known else "-"


def _worst(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{max(known):.2f} s" if known else "-"


def _result(report: RunReport) -> str:
    if report.problem:
        return "failed"
    if report.label.startswith("failures"):
        return "equal" if report.equal else f"{len(report.differences)} differences"
    return "reference" if report.equal else f"{len(report.differences)} differences"


def _style(report: RunReport) -> str:
    return "green" if report.equal else "bold red"
