"""`belayer status` as rich tables."""

from __future__ import annotations

import re
from collections import Counter

from rich.console import Group
from rich.text import Text

from belayer.cli.status_rows import EngineRow, LossRow, RunRow, Snapshot, TrajectoryRow
from replay.rows import Rows

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


_LOSSES_SHOWN = 10


_URGENT = ("recovering", "aborted", "open", "empty", "finished")
"""The order of trajectories: what needs a look first."""


def tables(snapshot: Snapshot, limit: int = 0) -> Group:
    """Runs, trajectories (at most `limit`; 0: all) and engines, each a table; what there is none of is left out. At the
    end what was lost."""
    parts = [
        *([_runs(snapshot.runs)] if snapshot.runs else []),
        *(_trajectories(snapshot.trajectories, limit) if snapshot.trajectories else []),
        *([_engines(snapshot.engines)] if snapshot.engines else []),
        *([Text(f"{snapshot.archived} more trajectories are archived.", "dim")] if snapshot.archived else []),
    ]
    unreadable = [Text(f"Cannot be read: {row.problem}.", "bold red") for row in snapshot.unreadable]
    nothing = "There is nothing here that was asked for." if snapshot.others else "The journal is empty."
    return Group(*(parts or [Text(nothing, "dim")]), *unreadable, *_losses(snapshot.losses))


def _losses(rows: list[LossRow]) -> list[Text]:
    """A sentence for each, the newest last."""
    if not rows:
        return [Text("No acknowledged event was found to be lost.", "dim")]
    lines = [_loss(row) for row in rows[-_LOSSES_SHOWN:]]
    if more := len(rows) - len(lines):
        again = sum(row.stored_again for row in rows[:more])
        lines.insert(0, Text(f"{more} earlier losses, {again} of them stored again; --json lists them all.", "dim"))
    return lines


def _loss(row: LossRow) -> Text:
    count = row.last_sequence - row.first_sequence + 1
    events = "1 event" if count == 1 else f"{count} events"
    place = f"sequence {row.first_sequence}" + (f" to {row.last_sequence}" if count > 1 else "")
    lost = f"Lost by the server {_age(row.age_s)} ago: {events} of {row.stream}, {place}; "
    if row.stored_again:
        return Text(f"{lost}stored again.", "yellow")
    return Text(f"{lost}not stored again.", "bold red")


def _state(name: str) -> Text:
    return Text(name, _STYLES.get(name, ""))


def _age(age_s: float) -> str:
    if age_s < 100:
        return f"{age_s:.1f} s"
    return f"{age_s / 60:.0f} min" if age_s < 6000 else f"{age_s / 3600:.0f} h"


def _runs(rows: list[RunRow]) -> Rows:
    table = Rows("run", "state", "host", "durability", ">weights", ">last event", title="Runs")
    for row in rows:
        table.add(row.run, _state(row.state), row.host, row.durability, str(row.weight_version), _age(row.age_s))
    return table


def _trajectories(found: list[TrajectoryRow], limit: int) -> list[Rows | Text]:
    rows = sorted(found, key=lambda row: (_URGENT.index(row.state), _natural(row.trajectory)))
    left_out = rows[limit:] if limit else []
    rows = rows[: len(rows) - len(left_out)]
    told: list[Rows | Text] = [_trajectory_table(rows, f"Trajectories: {_counts(found)}")]
    if left_out:
        more = f"{_counts(left_out)} more are not shown; --limit 0 shows all, --state and --run choose"
        told.append(Text(f"{more}.", "dim"))
    return told


def _natural(name: str) -> list[tuple[int, str]]:
    """`t-9` before `t-10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name) if part]


def _counts(rows: list[TrajectoryRow]) -> str:
    count = Counter(row.state for row in rows)
    return ", ".join(f"{count[state]:,} {state}" for state in _URGENT if count[state])


def _trajectory_table(rows: list[TrajectoryRow], title: str) -> Rows:
    columns = ("trajectory", "state", ">epoch", ">last event", "at", ">rewinds", "~checkpoint", "~sandbox")
    table = Rows(*columns, title=title)
    for row in rows:
        there = row.sandbox_state not in ("none", "removed")
        checkpoint = f"boundary {row.checkpoint_boundary}" if row.checkpoint else "initial state" if there else ""
        if row.checkpoint_left_out:
            checkpoint += f", files alone, without {row.checkpoint_left_out[0]}"
        sandbox = _state(row.sandbox_state)
        if row.sandbox_failures:
            sandbox.append(f", failed {row.sandbox_failures}x", "dim")
        if row.sandbox_left_out:
            sandbox.append(f", without {row.sandbox_left_out[0]}", "yellow")
        table.add(
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


def _engines(rows: list[EngineRow]) -> Rows:
    columns = ("worker", "role", "state", ">weights", ">handovers", "incarnation", "address")
    table = Rows(*columns, title="Engines")
    for row in rows:
        weights, handovers = str(row.weight_version), str(row.handovers)
        table.add(row.worker, row.role, _state(row.state), weights, handovers, row.incarnation, row.address)
    return table
