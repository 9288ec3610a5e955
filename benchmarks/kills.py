"""Kills in all phases over the recorded trajectories, until there are enough; each run must end as the undisturbed one.

Runs are those of `belayer demo`: one kill of each kind (`belayer.demo.failures.Kind`) a run, at seeded random instants.
Every other run has a witness in its container, a process whose memory is compared too; the others have only files, as
most recorded containers do, so that checkpoints of that kind and boundaries that need none are hit as well.

A run's name decides its failures, so the seed and the place in the sequence are all of it. Its result goes to a line of
FOLDER/seed-N.jsonl as soon as it has ended; started again, what is there is not run again. A trajectory whose two
undisturbed runs differ cannot be compared; it is named and left out.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Callable, Sequence
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


class Kills:
    """The state of a sequence of runs with one seed."""

    def __init__(self, path: Path, runs: Runs, wanted: int) -> None:
        self._path = path
        self._runs = runs
        self._wanted = wanted
        self.lines: list[Line] = []
        if path.exists():
            self.lines = [msgspec.json.decode(line, type=Line) for line in path.read_bytes().splitlines()]
        self._known = {(line.trajectory, line.number) for line in self.lines}
        self._under_way = 0

    @property
    def killed(self) -> int:
        return sum(sum(line.kills.values()) for line in self.lines)

    def is_needed(self, subject: Subject, number: int) -> bool:
        """Whether this run is still to be made, given what has ended and what is under way."""
        expected = self.killed + self._under_way * len(Kind)
        return (subject.name, number) not in self._known and expected < self._wanted

    async def make(self, subject: Subject, undisturbed: Outcome, number: int) -> None:
        """Make a run and keep its result."""
        self._under_way += 1
        try:
            report = await self._runs.disturbed(subject, undisturbed, number)
        finally:
            self._under_way -= 1
        counts = {kind.value: sum(one.kind is kind for one in report.recoveries) for kind in Kind}
        waits_s = [(one.kind.value, one.resumed_s) for one in report.recoveries if one.resumed_s is not None]
        problems = [report.problem] * bool(report.problem) + [str(one) for one in report.differences]
        line = Line(subject.name, number, counts, waits_s, problems, round(report.wall_s, 1))
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
        kills = Kills(folder / f"seed-{seed}.jsonl", runs, wanted)
        say(f"{kills.killed} of {wanted} kills are done; results in {folder}")
        subjects = [await with_image(subject, say) for subject in subjects]
        for subject in subjects:
            subject.chat.write_token_recording(stage.recordings)
        await begin(stage)
        left_out: list[str] = []
        waiting = asyncio.Semaphore(parallel)

        async def variants(subject: Subject) -> list[tuple[Subject, Outcome]]:
            found: list[tuple[Subject, Outcome]] = []
            for variant, label in ((subject, UNDISTURBED), (subject.unwatched(), f"{UNDISTURBED} unwatched")):
                (_, one), (_, other) = await asyncio.gather(
                    runs.undisturbed(variant, label), runs.undisturbed(variant, f"{label} again")
                )
                if one is None or other is None or compare(one, other, subject.chat):
                    left_out.append(f"{subject.name} ({label})")
                    say(f"left out, its undisturbed runs differ: {left_out[-1]}")
                else:
                    found.append((variant, one))
            return found

        async def one(variant: Subject, outcome: Outcome, number: int) -> None:
            try:
                await kills.make(variant, outcome, number)
            finally:
                waiting.release()

        comparable = [pair for pairs in await asyncio.gather(*map(variants, subjects)) for pair in pairs]
        async with asyncio.TaskGroup() as tasks:
            number = 0
            while comparable and kills.killed < wanted:
                number += 1
                for variant, outcome in comparable:
                    numbered = 2 * number + (not variant.spec.setup)  # even ones have a witness
                    await waiting.acquire()
                    if kills.is_needed(variant, numbered):
                        tasks.create_task(one(variant, outcome, numbered))
                    else:
                        waiting.release()
                if number > wanted:  # nothing strikes any more
                    break
        await finish(stage)
        audited = folder / stage.run
        audited.mkdir()
        _, findings, _ = await audit_run(stage, audited)
    return report_of(kills.lines, left_out, findings)


def report_of(lines: Sequence[Line], left_out: list[str], findings: list[str]) -> dict[str, Any]:
    """What the runs came to."""
    waits_s = sorted(wait_s for line in lines for _, wait_s in line.recovery_s)
    by_kind = {
        kind.value: {
            "kills": sum(line.kills.get(kind.value, 0) for line in lines),
            "median_s": round(statistics.median(found), 3) if found else None,
            "worst_s": round(max(found), 3) if found else None,
        }
        for kind in Kind
        for found in [[wait_s for line in lines for name, wait_s in line.recovery_s if name == kind.value]]
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
