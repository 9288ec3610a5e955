"""The demo: undisturbed runs of recorded trajectories, then the same with failures, compared and audited.

A run that does not come to its end is reported as such and does not stop the others. What cannot be run at all (a
file that cannot be read, a trajectory too short for the failures, a machine without Docker) is said before anything
is started.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from belayer.demo.engines import EngineName, chat_of
from belayer.demo.failures import Kind
from belayer.demo.report import DemoReport
from belayer.demo.results import audit_run, write_timelines
from belayer.demo.runs import Board, Runs
from belayer.demo.stage import Stage, begin, finish, open_stage
from belayer.demo.subjects import read_subjects, with_image

_REMOVED_S = 30.0
_LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Options:
    """What a person chose."""

    trajectories: Path
    kinds: Sequence[Kind] = tuple(Kind)
    runs: int = 2
    """Runs with failures of each trajectory."""
    seed: int = 1
    engine: EngineName = "recorded"
    tokens_per_s: float = 400.0
    """The recorded engine's."""
    keep: bool = False
    results: Path = Path(tempfile.gettempdir()) / "belayer-demo-results"
    parallel: int = (os.cpu_count() or 1) + 1


async def run_demo(options: Options, board: Board) -> DemoReport:
    """Run it all. BelayerError when the demo cannot be run; a run that goes wrong is in the report instead."""
    started = time.monotonic()
    subjects = read_subjects(options.trajectories, len(options.kinds), chat_of(options.engine))
    chats = [subject.chat for subject in subjects]
    opening = open_stage(tokens_per_s=options.tokens_per_s, keep=options.keep, engine=options.engine, chats=chats)
    async with opening as stage:
        subjects = [await with_image(subject, board.step) for subject in subjects]
        for subject in subjects:
            subject.chat.write_token_recording(stage.recordings)
        board.step("starting actors and engines")
        await begin(stage)
        demo = Runs(stage, board, options.seed, options.kinds, options.parallel)
        board.step("undisturbed runs")
        undisturbed = await asyncio.gather(*(demo.undisturbed(subject) for subject in subjects))
        board.step("runs with failures")
        disturbed = await asyncio.gather(
            *(
                demo.disturbed(subject, outcome, number)
                for number in range(1, options.runs + 1)
                for subject, (_, outcome) in zip(subjects, undisturbed, strict=True)
                if outcome is not None
            )
        )
        board.step("removing containers, auditing the journal")
        await finish(stage)
        left = await _left_behind(stage)
        folder = options.results / stage.run
        folder.mkdir(parents=True, exist_ok=True)
        export, findings, events = await audit_run(stage, folder)
        timelines = await asyncio.to_thread(write_timelines, export, stage.run, disturbed)
        findings += [f"the actors did not remove container {name}" for name in left]
    return DemoReport(
        seed=options.seed,
        runs=[*(report for report, _ in undisturbed), *disturbed],
        findings=findings,
        events=events,
        wall_s=time.monotonic() - started,
        export=export,
        timelines=timelines,
        kept=stage.folder if options.keep else None,
        trajectories=[subject.name for subject in subjects],
    )


async def _left_behind(stage: Stage) -> list[str]:
    """Containers of the run that the actors have not removed in time; they are removed when the stage closes."""
    deadline = time.monotonic() + _REMOVED_S
    # Polled: Docker tells nobody.
    while (left := await stage.sandboxes.incarnations(stage.run)) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_EVERY_S)
    return left
