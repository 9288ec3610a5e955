"""Rollout time of the recorded trajectories: undisturbed, and when actions fail, with Belayer and without.

    python -m benchmarks.trajectories [--trajectories 3] [--pace 10] [--rounds 1] [--policy adaptive] [--json FILE]
    python -m benchmarks.trajectories --kills 500 --seed 1 [--results FOLDER]   (about half an hour)

The model's time comes from the recording's time stamps, `--pace` times as fast; actions really run, at their own pace,
in containers made for them. Each trajectory runs undisturbed without Belayer and with it, and, with one failing action
(its container is killed as it begins) at a random place, with Belayer, with a restart from the start, and with a replay
of all actions before. What a failure costs is the time from the begin of the action that failed to its end after all,
less what it then took. The increase at a failure rate is to first order: rate x actions x cost of one failure, over the
undisturbed time without Belayer; Belayer's own has the failure-free overhead added. A faster pace flatters nobody but
those who lose model time: at `--pace 1` the figures are those of the recorded model.

`--kills N`: instead, at least N kills of containers, engines, actors and Redis in all phases; every run must end equal
to the undisturbed one. See `benchmarks/kills.py`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from belayer import ids
from belayer.cli.demo import until_stopped
from belayer.demo.agent import Surroundings, roll_out
from belayer.demo.compare import Outcome, compare
from belayer.demo.container_state import ContainerState
from belayer.demo.pace import generation_times_s, paced
from belayer.demo.results import journal_name
from belayer.demo.runs import CHUNK_S, CHUNK_TOKENS
from belayer.demo.stage import WORKER, Stage, begin, finish, open_stage
from belayer.demo.subjects import Subject, read_subjects, with_image
from belayer.errors import BelayerError
from belayer.ids import StreamKind
from belayer.journal.events import ActionCommitted, CheckpointExtended, CheckpointPublished, SandboxRestored
from belayer.journal.writer import Reader
from belayer.processes import kill
from belayer.projections.trajectory import TrajectoryState
from belayer.sandbox.protocol import Incarnation
from benchmarks import kills
from benchmarks.trajectory_rivals import Alone, Way

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "trajectories"
SHARED = ROOT.parent / "shared" / "trajectories"
TOKENS_PER_S = 5000.0
RATE = 0.01
SHOWN_DIFFERENCES = 5


@dataclass(slots=True)
class Figures:
    """Of one trajectory, one value a round. Times in seconds."""

    actions: int = 0
    alone_s: list[float] = field(default_factory=list[float])
    belayer_s: list[float] = field(default_factory=list[float])
    lost_s: dict[str, list[float]] = field(default_factory=lambda: {"belayer": [], "restart": [], "replay": []})
    trials: int = 0
    equal: int = 0
    differences: list[str] = field(default_factory=list[str])


class Trials:
    """The runs of one subject."""

    def __init__(self, stage: Stage, subject: Subject, times_s: list[float], pace: float) -> None:
        self._stage = stage
        self._subject = subject
        self._model_s = paced(times_s, pace)
        self.figures = Figures()

    async def round(self, number: int, doomed_at: float) -> None:
        """All runs once; `doomed_at` in [0, 1) says which action fails."""
        figures = self.figures
        alone = await self._alone("alone", number, "restart", 0)
        figures.alone_s.append(alone.wall_s)
        figures.actions = alone.actions
        doomed = 1 + int(doomed_at * alone.actions)
        outcome, wall_s, _ = await self._with_belayer("undisturbed", number, 0)
        figures.belayer_s.append(wall_s)
        disturbed, _, lost_s = await self._with_belayer("failure", number, doomed)
        figures.lost_s["belayer"].append(lost_s)
        differences = compare(outcome, disturbed, self._subject.chat)
        figures.trials += 1
        figures.equal += not differences
        figures.differences += [
            f"{self._subject.name} round {number}: {one}" for one in differences[:SHOWN_DIFFERENCES]
        ]
        for way in ("restart", "replay"):
            figures.lost_s[way].append((await self._alone(way, number, way, doomed)).lost_s)
        lost = {way: round(values[-1], 2) for way, values in figures.lost_s.items()}
        say(
            f"{self._subject.name} round {number}: {alone.actions} actions, {alone.wall_s:.1f} s alone, "
            f"{wall_s:.1f} s with Belayer; action {doomed} failed and cost s {lost}"
        )

    def _around(self, **more: Any) -> Surroundings:
        stage = self._stage
        return Surroundings(
            stage.store,
            stage.sandboxes,
            stage.engines,
            WORKER,
            stage.run,
            chunk_tokens=CHUNK_TOKENS,
            chunk_s=CHUNK_S,
            model_s=self._model_s,
            **more,
        )

    async def _alone(self, what: str, number: int, way: Way, doomed: int) -> Alone:
        name = journal_name(self._subject.name, self._stage.run, f"{what} {number}")
        rollout = Alone(self._around(), name, self._subject, way, doomed)
        await rollout.run()
        return rollout

    async def _with_belayer(self, what: str, number: int, doomed: int) -> tuple[Outcome, float, float]:
        """Its outcome, how long it took, and what the failure cost."""
        name = journal_name(self._subject.name, self._stage.run, f"{what} {number}")
        collected: list[ContainerState] = []
        killed_ns = 0

        async def collect(incarnation: Incarnation, state: TrajectoryState) -> None:
            nonlocal reading_s
            began = time.monotonic()
            collected.append(await self._stage.reader.read(incarnation.pid, watched=False))
            reading_s += time.monotonic() - began

        async def fail(incarnation: Incarnation, action: int) -> None:
            nonlocal killed_ns
            if action == doomed and not killed_ns:
                killed_ns = time.time_ns()
                await kill(incarnation.pid, incarnation.pid_start_ticks)

        reading_s, started = 0.0, time.monotonic()
        final = await roll_out(self._around(before_action=fail), name, self._subject.chat, self._subject.spec, collect)
        wall_s = time.monotonic() - started - reading_s
        lost_s = 0.0
        if killed_ns:
            history = await Reader(self._stage.store, ids.trajectory(name)).catch_up()
            lost_s = next(
                (recorded.time_ns - killed_ns) / 1e9 - recorded.event.duration_s
                for recorded in history
                if isinstance(recorded.event, ActionCommitted)
                and recorded.event.action == doomed
                and recorded.time_ns > killed_ns
            )
        return Outcome(final, collected[-1]), wall_s, lost_s


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def find_subjects(count: int, least_turns: int) -> list[tuple[Subject, Path]]:
    """The shipped trajectories, then the shared ones where there are any; without images."""
    found: dict[str, tuple[Subject, Path]] = {}
    for folder in (EXAMPLES, SHARED):
        if folder.is_dir():
            for subject in sorted(read_subjects(folder, least_turns), key=lambda subject: subject.name):
                found.setdefault(subject.name, (subject, folder / f"{subject.name}.traj.json"))
    return list(found.values())[:count]


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    found = find_subjects(options.trajectories, 0)
    random_ = random.Random(options.seed)
    slots = asyncio.Semaphore(options.parallel)
    async with open_stage(tokens_per_s=TOKENS_PER_S, keep=False, actor_options=["--policy", options.policy]) as stage:
        trials: list[Trials] = []
        for subject, path in found:
            ready = (await with_image(subject, say)).unwatched()
            ready.chat.write_token_recording(stage.recordings)
            trials.append(Trials(stage, ready, generation_times_s(path), options.pace))
        await begin(stage)

        async def one(trial: Trials, places: Sequence[float]) -> None:
            for number, place in enumerate(places, 1):
                async with slots:
                    await trial.round(number, place)

        # Each round has its own part of the trajectory, so that few rounds cover it evenly.
        places = [[(number + random_.random()) / options.rounds for number in range(options.rounds)] for _ in trials]
        async with asyncio.TaskGroup() as tasks:
            for trial, at in zip(trials, places, strict=True):
                tasks.create_task(one(trial, at))
        captures = await capture_figures(stage)
        await finish(stage)
    return figures_of([trial.figures for trial in trials]) | captures


async def capture_figures(stage: Stage) -> dict[str, Any]:
    """What the sandboxes' streams say of frozen times, restores and boundaries that needed no capture."""
    frozen_s: list[float] = []
    restore_s: list[float] = []
    captured = extended = 0
    for stream in await stage.store.streams(StreamKind.SANDBOX):
        for recorded in await Reader(stage.store, stream).catch_up():
            match recorded.event:
                case CheckpointPublished():
                    captured += 1
                    frozen_s.append(recorded.event.frozen_s)
                case CheckpointExtended():
                    extended += 1
                    frozen_s.append(recorded.event.frozen_s)
                case SandboxRestored() if recorded.event.checkpoint:
                    restore_s.append(recorded.event.restore_s)
                case _:
                    pass
    frozen_s.sort()
    return {
        "boundaries": captured + extended,
        "skipped_boundaries": extended,
        "skipped_share": rounded(extended / max(1, captured + extended)),
        "frozen_median_s": rounded(statistics.median(frozen_s)) if frozen_s else None,
        "frozen_p99_s": rounded(frozen_s[min(len(frozen_s) - 1, int(len(frozen_s) * 0.99))]) if frozen_s else None,
        "restores": len(restore_s),
        "restore_median_s": rounded(statistics.median(restore_s)) if restore_s else None,
        "restore_worst_s": rounded(max(restore_s)) if restore_s else None,
    }


def figures_of(found: Sequence[Figures]) -> dict[str, Any]:
    """Over all trajectories; medians over the rounds of each, weighted by their length."""
    alone_s = sum(statistics.median(one.alone_s) for one in found)
    belayer_s = sum(statistics.median(one.belayer_s) for one in found)
    overhead = belayer_s / alone_s - 1
    increase = {
        way: sum(RATE * one.actions * statistics.mean(one.lost_s[way]) for one in found) / alone_s
        for way in ("belayer", "restart", "replay")
    }
    return {
        "trajectories": len(found),
        "actions": sum(one.actions for one in found),
        "trials": sum(one.trials for one in found),
        "equal": sum(one.equal for one in found),
        "differences": [text for one in found for text in one.differences],
        "undisturbed_s": rounded(alone_s),
        "failure_free_overhead": rounded(overhead),
        "lost_median_s": {
            way: rounded(statistics.median([value for one in found for value in one.lost_s[way]])) for way in increase
        },
        "failures_increase_1pct": rounded(increase["belayer"]),
        "rollout_increase_1pct": rounded(overhead + increase["belayer"]),
        "restart_increase_1pct": rounded(increase["restart"]),
        "replay_increase_1pct": rounded(increase["replay"]),
    }


def rounded(value: float) -> float:
    return round(value, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=3, help="how many: the shipped ones, then others")
    parser.add_argument("--pace", type=float, default=10.0, help="how many times faster than recorded the model is")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=1, help="rollouts at a time (with --kills: CPUs + 1)")
    parser.add_argument("--policy", choices=["every-boundary", "adaptive"], default="every-boundary")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("belayer-kills"), help="folder of --kills")
    parser.add_argument("--json", type=Path, help="a file for the last line")
    options = parser.parse_args()
    started = time.monotonic()
    try:
        if options.kills:
            found = [subject for subject, _ in find_subjects(options.trajectories, 0)]
            report = asyncio.run(until_stopped(kills.run(found, options.kills, options.seed, options.results, say)))
        else:
            report = asyncio.run(until_stopped(measure(options))) | {"pace": options.pace, "rounds": options.rounds}
    except KeyboardInterrupt:
        sys.exit(130)
    except BelayerError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    report |= {"policy": options.policy, "seed": options.seed, "wall_s": round(time.monotonic() - started, 1)}
    report["machine"] = {"cpus": os.cpu_count(), "kernel": platform.release(), "load": os.getloadavg()[0]}
    line = json.dumps(report)
    if options.json:
        options.json.write_text(line + "\n")
    print(line)
    sys.exit(0 if report["equal"] == report["trials"] else 1)


if __name__ == "__main__":
    main()
