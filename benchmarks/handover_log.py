"""What a new main does first after a handover, from its log: `python -m benchmarks.handover_log LOGS HANDOVER.JSON`.

The plugin logs when its first batches are launched and when the first tokens of a decode step go out, after the moment
from which it serves. A run of the benchmark keeps that with each kill; this adds it to a run that was made before, from
the engines' logs that came with it, and prints where the time of each kind of kill went.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_SAID = re.compile(r"belayer: (a batch|tokens) of (\d+), ([\d.]+) s after it served")
_HEADING = re.compile(r"^===== (?:shadow(\d+)|\S+)\.log$", re.MULTILINE)


def first_steps(log: str) -> dict[str, float]:
    """Seconds after it served: `launched_s` the first batch, `tokens_s` the first tokens. Empty when it says none.

    `streams`: in how many requests' first tokens.
    """
    batch_s: float | None = None
    for what, streams, after_s in _SAID.findall(log):
        if what == "tokens" and batch_s is not None:
            return {"launched_s": batch_s, "tokens_s": float(after_s), "streams": int(streams)}
        batch_s = float(after_s) if batch_s is None else batch_s
    return {}


def of_shadows(logs: str) -> list[dict[str, float]]:
    """The first steps of every shadow that became the main, in the order of their numbers: that of the kills."""
    headings = list(_HEADING.finditer(logs))
    ends = [*(heading.start() for heading in headings[1:]), len(logs)]
    found = {
        int(heading[1]): first_steps(logs[heading.end() : end])
        for heading, end in zip(headings, ends, strict=True)
        if heading[1]
    }
    return [steps for _, steps in sorted(found.items()) if steps]


def add(run: dict[str, Any], logs: str) -> None:
    """Put the first steps to the run's kills. ValueError when there are not as many of them, or of other batches."""
    kills = [(kind, kill) for kind, of_kind in _kinds(run).items() for kill in of_kind["kills"]]
    steps = of_shadows(logs)
    if len(steps) != len(kills):
        raise ValueError(f"{len(kills)} kills, but the logs have the first steps of {len(steps)} new mains")
    for (kind, kill), one in zip(kills, steps, strict=True):
        if one["streams"] > len(kill["waits_s"]):
            raise ValueError(f"{kind}: {len(kill['waits_s'])} streams went on, but the log says {one['streams']}")
        kill["first_steps"] = one


def parts(kills: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Where the time from the kill to the callers' next token went: medians over the kills, in seconds."""
    each = [
        (
            kill["promoted_s"],
            kill["first_steps"]["launched_s"],
            kill["first_steps"]["tokens_s"] - kill["first_steps"]["launched_s"],
            statistics.median(kill["waits_s"]) - kill["promoted_s"] - kill["first_steps"]["tokens_s"],
        )
        for kill in kills
        if kill.get("first_steps")
    ]
    if not each:
        return {}
    names = ("until_it_serves_s", "until_its_first_batch_s", "first_step_s", "tokens_way_back_s")
    medians = (round(statistics.median(values), 4) for values in zip(*each, strict=True))
    return dict(zip(names, medians, strict=True))


def _kinds(run: Mapping[str, Any]) -> Mapping[str, Any]:
    return run["stages"]["kills"]["by_kind"]


def main() -> None:
    logs, path = Path(sys.argv[1]), Path(sys.argv[2])
    run = json.loads(path.read_text())
    add(run, logs.read_text(errors="replace"))
    for kind, of_kind in _kinds(run).items():
        of_kind["parts"] = parts(of_kind["kills"])
        print(kind, json.dumps(of_kind["parts"]))
    path.write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    main()
