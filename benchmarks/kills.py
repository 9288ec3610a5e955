"""Kills in all phases over the recorded trajectories, until there are enough; each run must end as the undisturbed one.

Runs are those of `belayer demo`: one kill of each kind (`belayer.demo.failures.Kind`) a run, at seeded random instants.
Every other run has a witness in its container, a process whose memory is compared too; the others have only files, as
most recorded containers do, so that checkpoints of that kind and boundaries that need none are hit as well.

A run's name decides its failures, so the seed and the place in the sequence are all of it. Its result goes to a line of
FOLDER/seed-N.jsonl as soon as it has ended; started again, what is there is not run again. A trajectory whose two
undisturbed runs differ cannot be compared; it is named and left out.

On two cores with nothing else to do 500 kills take about half an hour; progress says how long is left.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from belayer.demo.compare import Outcome, compare
from belayer.demo.failures import Kind
from belayer.demo.report import RunReport
from belayer.demo.results import audit_run
from belayer.demo.runs import UNDISTURBED, Runs
from belayer.demo.stage import begin, finish, open_stage
from belayer.demo.subjects import Subject, with_image
from belayer.demo.view import View

TOKENS_PER_S = 400.0
Say = Callable[[str], None]


class Line(msgspec.Struct):
    """A finished run, as it is kept."""

    trajectory: str
    number: int
    kills: dict[str, int]
    recovery_s: list[tuple[str, float]]
    problems: list[str]
    """Empty: it ended as the undisturbed run."""
    wall_s: float
    recovered_s: list[tuple[str, float]] = []
    """Until a new incarnation was there; of a killed checkpointer, until the next checkpoint was published."""


class Progress:
    """Tells of runs on one line each. A demo's Board."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def step(self, text: str) -> None:
        self._say(text)

    def row(
        self, trajectory: str, label: str, turns: int, view: View, struck: Callable[[], int], failures: int
    ) -> None:
        """A run has begun: nothing is said before its end."""

    def done(self, report: RunReport) -> None:
        waits_s = [recovery.resumed_s for recovery in report.recoveries if recovery.resumed_s is not None]
        worst = f", worst recovery {max(waits_s):.2f} s" if waits_s else ""
        state = "equal" if report.equal else f"NOT equal: {report.problem or report.differences[0]}"
        kills = len(report.recoveries)
        self._say(f"{report.trajectory} {report.label}: {kills} kills{worst}, {report.wall_s:.0f} s, {state}")


class Kept:
    """The results of the sequence of runs with one seed, in a file: what has ended is never run again."""

    def __init__(self, path: Path, wanted: int) -> None:
        self._path = path
        self._wanted = wanted
        self.lines: list[Line] = []
        if path.exists():
            self.lines = [msgspec.json.decode(line, type=Line) for line in path.read_bytes().splitlines()]
        self._begun = {(line.trajectory, line.number) for line in self.lines}

    @property
    def kills(self) -> int:
        return sum(sum(line.kills.values()) for line in self.lines)

    @property
    def under_way(self) -> int:
        """Runs that were begun and have not ended."""
        return len(self._begun) - len(self.lines)

    @property
    def enough(self) -> bool:
        return self.kills >= self._wanted

    @property
    def perhaps_enough(self) -> bool:
        """Whether the runs under way, should each failure strike, are all that it takes."""
        return self.kills + self.under_way * len(Kind) >= self._wanted

    def begin(self, trajectory: str, number: int) -> bool:
        """Note that this run is under way. False: it was, or has ended."""
        new = (trajectory, number) not in self._begun
        self._begun.add((trajectory, number))
        return new

    def keep(self, number: int, report: RunReport) -> None:
        """A run that was begun has ended."""
        counts = {kind.value: sum(one.kind is kind for one in report.recoveries) for kind in Kind}
        waits_s = [(one.kind.value, one.resumed_s) for one in report.recoveries if one.resumed_s is not None]
        recovered_s = [(one.kind.value, one.recovered_s) for one in report.recoveries if one.recovered_s is not None]
        problems = [report.problem] * bool(report.problem) + [str(one) for one in report.differences]
        line = Line(report.trajectory, number, counts, waits_s, problems, round(report.wall_s, 1), recovered_s)
        self.lines.append(line)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


async def run(subjects: Sequence[Subject], wanted: int, seed: int, folder: Path, say: Say) -> dict[str, Any]:
    """At least `wanted` kills, those of earlier starts included."""
    folder.mkdir(parents=True, exist_ok=True)
    subjects = [subject for subject in subjects if len(subject.chat.recording.turns) > len(Kind)]
    parallel = (os.cpu_count() or 1) + 1
    async with open_stage(tokens_per_s=TOKENS_PER_S, keep=False) as stage:
        runs = Runs(stage, Progress(say), seed, tuple(Kind), parallel)
        kept = Kept(folder / f"seed-{seed}.jsonl", wanted)
        say(f"{kept.kills} of {wanted} kills are done; results in {folder}")
        subjects = [await with_image(subject, say) for subject in subjects]
        for subject in subjects:
            subject.chat.write_token_recording(stage.recordings)
        await begin(stage)
        left_out: list[str] = []
        ended = asyncio.Condition()

        async def variants(subject: Subject) -> list[tuple[Subject, Outcome]]:
            found: list[tuple[Subject, Outcome]] = []
            for variant, label in ((subject, UNDISTURBED), (subject.unwatched(), f"{UNDISTURBED} unwatched")):
                (_, one), (_, other) = await asyncio.gather(
                    runs.undisturbed(variant, label), runs.undisturbed(variant, f"{label} again")
                )
                if one is None or other is None:
                    left_out.append(f"{subject.name} ({label}): it did not end undisturbed")
                elif differences := compare(one, other, subject.chat):
                    left_out.append(f"{subject.name} ({label}): its undisturbed runs differ, {differences[0]}")
                else:
                    found.append((variant, one))
            return found

        async def one(variant: Subject, outcome: Outcome, number: int) -> None:
            report = await runs.disturbed(variant, outcome, number)
            async with ended:
                kept.keep(number, report)
                ended.notify_all()
            left_s = (wanted - kept.kills) * (time.monotonic() - began) / max(1, kept.kills - before)
            say(f"{kept.kills} of {wanted} kills; about {max(0.0, left_s) / 60:.0f} min are left")

        comparable = [pair for pairs in await asyncio.gather(*map(variants, subjects)) for pair in pairs]
        for text in left_out:
            say(f"left out: {text}")
        began, before = time.monotonic(), kept.kills
        async with asyncio.TaskGroup() as tasks:
            async for variant, outcome, number in _as_needed(comparable, kept, parallel, ended, wanted):
                tasks.create_task(one(variant, outcome, number))
        await finish(stage)
        audited = folder / stage.run
        audited.mkdir()
        _, findings, _ = await audit_run(stage, audited)
    return report_of(kept.lines, left_out, findings)


async def _as_needed(
    comparable: Sequence[tuple[Subject, Outcome]], kept: Kept, parallel: int, ended: asyncio.Condition, most: int
) -> AsyncIterator[tuple[Subject, Outcome, int]]:
    """One run after the other, each once there is room for it and it is clear that those before are not enough."""
    for turn in range(1, most + 1):
        for variant, outcome in comparable:
            number = 2 * turn + (not variant.spec.setup)  # even ones have a witness
            async with ended:
                await ended.wait_for(lambda: kept.enough or (kept.under_way < parallel and not kept.perhaps_enough))
            if kept.enough:
                return
            if kept.begin(variant.name, number):
                yield variant, outcome, number


def report_of(lines: Sequence[Line], left_out: list[str], findings: list[str]) -> dict[str, Any]:
    """What the runs came to."""
    waits_s = sorted(wait_s for line in lines for _, wait_s in line.recovery_s)
    by_kind = {
        kind.value: {
            "kills": sum(line.kills.get(kind.value, 0) for line in lines),
            **_spread("", [wait_s for line in lines for name, wait_s in line.recovery_s if name == kind.value]),
            **_spread(
                "recovered_", [wait_s for line in lines for name, wait_s in line.recovered_s if name == kind.value]
            ),
        }
        for kind in Kind
    }
    return {
        "trials": len(lines),
        "equal": sum(not line.problems for line in lines) if not findings else 0,
        "kills": sum(sum(line.kills.values()) for line in lines),
        "recovery_median_s": round(statistics.median(waits_s), 3) if waits_s else None,
        "recovery_worst_s": round(waits_s[-1], 3) if waits_s else None,
        "by_kind": by_kind,
        "left_out": left_out,
        "findings": findings,
        "problems": [f"{line.trajectory} {line.number}: {text}" for line in lines for text in line.problems],
    }


def _spread(what: str, waits_s: list[float]) -> dict[str, float | None]:
    """The median and the worst; null when there are none."""
    if not waits_s:
        return {f"{what}median_s": None, f"{what}worst_s": None}
    return {f"{what}median_s": round(statistics.median(waits_s), 3), f"{what}worst_s": round(max(waits_s), 3)}
