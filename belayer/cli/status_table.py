"""`belayer status` as rich tables."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from belayer.cli.status_rows import EngineRow, RunRow, Snapshot, TrajectoryRow

_STYLES = {
    "open": "green",
    "live": "green",
    "ready": "green",
    "going on": "green",
    "finished": "bold",
    "recovering": "bold yellow",
    "starting": "yellow",
    "failed": "bold red",
    "excluded": "bold red",
    "aborted": "bold red",
    "removed": "dim",
    "none": "dim",
    "empty": "dim",
}


def tables(snapshot: Snapshot) -> Group | Text:
    """Runs, trajectories and engines, each a table; what there is none of is left out."""
    parts = [
        *([_runs(snapshot.runs)] if snapshot.runs else []),
        *([_trajectories(snapshot.trajectories)] if snapshot.trajectories else []),
        *([_engines(snapshot.engines)] if snapshot.engines else []),
        *([Text(f"{snapshot.archived} more trajectories are archived.", "dim")] if snapshot.archived else []),
    ]
    return Group(*parts) if parts else Text("The journal is empty.", "dim")


def _state(name: str) -> Text:
    return Text(name, _STYLES.get(name, ""))


def _age(age_s: float) -> str:
    if age_s < 100:
        return f"{age_s:.1f} s"
    return f"{age_s / 60:.0f} min" if age_s < 6000 else f"{age_s / 3600:.0f} h"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", pad_edge=False, box=None, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column.startswith(">") else "left", overflow="fold")
        table.columns[-1].header = column.lstrip(">")
    return table


def _runs(rows: list[RunRow]) -> Table:
    table = _table("Runs", "run", "state", "host", "durability", ">weights", ">last event")
    for row in rows:
        table.add_row(row.run, _state(row.state), row.host, row.durability, str(row.weight_version), _age(row.age_s))
    return table


def _trajectories(rows: list[TrajectoryRow]) -> Table:
    columns = ("trajectory", "state", ">epoch", ">last event", "at", ">rewinds", "checkpoint", "sandbox")
    table = _table("Trajectories", *columns)
    for row in rows:
        there = row.sandbox_state not in ("none", "removed")
        checkpoint = f"boundary {row.checkpoint_boundary}" if row.checkpoint else "initial state" if there else ""
        sandbox = _state(row.sandbox_state)
        if row.sandbox_failures:
            sandbox.append(f", failed {row.sandbox_failures}x", "dim")
        table.add_row(
            row.trajectory,
            _state(row.state),
            str(row.epoch),
            _age(row.age_s),
            _place(row),
            str(row.rewinds),
            checkpoint,
            sandbox,
        )
    return table


def _place(row: TrajectoryRow) -> str:
    if row.action:
        return f"action {row.action} runs"
    if row.generating_tokens is not None:
        return f"generation {row.generation}: {row.generating_tokens} tokens"
    return f"boundary {row.boundary}"


def _engines(rows: list[EngineRow]) -> Table:
    table = _table("Engines", "worker", "role", "state", ">weights", ">handovers", "incarnation", "address")
    for row in rows:
        weights, handovers = str(row.weight_version), str(row.handovers)
        table.add_row(row.worker, row.role, _state(row.state), weights, handovers, row.incarnation, row.address)
    return table
