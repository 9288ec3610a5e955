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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from belayer import ids
from belayer.demo.agent import Surroundings, roll_out
from belayer.demo.compare import Difference, Outcome, check_witness, compare
from belayer.demo.container_state import ContainerState, Digests, read_container
from belayer.demo.failures import Kind, Planned, Profile, plan_failures
from belayer.demo.measures import cost_of, recovery_of
from belayer.demo.report import DemoReport, RunReport
from belayer.demo.results import audit_run, journal_name, write_timelines
from belayer.demo.stage import WORKER, Stage, begin, finish, open_stage
from belayer.demo.strikes import Striker
from belayer.demo.subjects import Subject, read_subjects, with_image
from belayer.demo.view import View, watching
from belayer.errors import BelayerError, InputError
from belayer.journal.codec import Recorded
from belayer.journal.writer import Reader
from belayer.projections.trajectory import Generation, TrajectoryState
from belayer.sandbox.protocol import Incarnation

UNDISTURBED = "undisturbed"
_CHUNK_TOKENS = 16
_CHUNK_S = 0.02
"""Smaller chunks than usual: turns are short here, and failures are aimed at what the journal shows of them."""
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
    tokens_per_s: float = 400.0
    keep: bool = False
    results: Path = Path(tempfile.gettempdir()) / "belayer-demo-results"
    parallel: int = (os.cpu_count() or 1) + 1


class Board(Protocol):
    """Where progress is shown."""

    def step(self, text: str) -> None:
        """Something that takes a while begins."""
        ...

    def row(
        self, trajectory: str, label: str, turns: int, view: View, struck: Callable[[], int], failures: int
    ) -> None:
        """A run has begun."""
        ...

    def done(self, report: RunReport) -> None:
        """A run has ended."""
        ...


async def run_demo(options: Options, board: Board) -> DemoReport:
    """Run it all. BelayerError when the demo cannot be run; a run that goes wrong is in the report instead."""
    started = time.monotonic()
    subjects = read_subjects(options.trajectories, len(options.kinds))
    async with open_stage(tokens_per_s=options.tokens_per_s, keep=options.keep) as stage:
        subjects = [await with_image(subject, board.step) for subject in subjects]
        for subject in subjects:
            subject.chat.write_token_recording(stage.recordings)
        board.step("starting actors and engines")
        await begin(stage)
        demo = _Demo(options, stage, board)
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


class _Demo:
    """The runs of one demo."""

    def __init__(self, options: Options, stage: Stage, board: Board) -> None:
        self._options = options
        self._stage = stage
        self._board = board
        self._slots = asyncio.Semaphore(options.parallel)
        self._redis = asyncio.Lock()
        self._digests: Digests = {}

    async def undisturbed(self, subject: Subject) -> tuple[RunReport, Outcome | None]:
        """What the others are compared with; None when even that went wrong."""
        report, outcome = await self._run(subject, UNDISTURBED, (), None)
        return report, None if report.problem else outcome

    async def disturbed(self, subject: Subject, undisturbed: Outcome, number: int) -> RunReport:
        """A run with failures, compared with the undisturbed one."""
        name = f"{subject.name}/{number}"
        label = f"failures {number}"
        try:
            plan = plan_failures(self._options.seed, name, self._options.kinds, profile_of(undisturbed.trajectory))
        except InputError as error:
            return RunReport(subject.name, label, 0.0, 0, problem=str(error))
        report, _ = await self._run(subject, label, plan, undisturbed)
        return report

    async def _run(
        self, subject: Subject, label: str, plan: Sequence[Planned], undisturbed: Outcome | None
    ) -> tuple[RunReport, Outcome | None]:
        stage = self._stage
        around = Surroundings(
            stage.store,
            stage.sandboxes,
            stage.engines,
            WORKER,
            stage.run,
            chunk_tokens=_CHUNK_TOKENS,
            chunk_s=_CHUNK_S,
        )
        name = journal_name(subject.name, stage.run, label)
        collected: list[ContainerState] = []

        async def collect(incarnation: Incarnation, state: TrajectoryState) -> None:
            collected.append(await read_container(incarnation.pid, self._digests))

        async with self._slots, watching(stage.store, name) as view:
            started = time.monotonic()
            striker = Striker(stage, view, self._redis)
            turns = len(subject.chat.recording.turns)
            self._board.row(subject.name, label, turns, view, lambda: len(striker.struck), len(plan))
            striking = asyncio.create_task(striker.strike_all(plan))
            outcome, problem = None, ""
            try:
                final = await roll_out(around, name, subject.chat, subject.spec, collect)
                await view.until(lambda view: view.ended, _REMOVED_S)
                await striking
                if final.phase == "finished":
                    outcome = Outcome(final, collected[-1])
                else:
                    problem = f"the trajectory was aborted: {final.reason}"
            except (BelayerError, TimeoutError) as error:
                problem = str(error) or type(error).__name__
            finally:
                striking.cancel()
                await asyncio.gather(striking, return_exceptions=True)
            wall_s = time.monotonic() - started
        differences: list[Difference] = []
        if outcome is not None:
            differences = (
                list(check_witness(outcome)) if undisturbed is None else compare(undisturbed, outcome, subject.chat)
            )
        report = await self._report(subject, label, name, striker, outcome, differences, problem, wall_s)
        self._board.done(report)
        return report, outcome

    async def _report(
        self,
        subject: Subject,
        label: str,
        name: str,
        striker: Striker,
        outcome: Outcome | None,
        differences: Sequence[Difference],
        problem: str,
        wall_s: float,
    ) -> RunReport:
        trajectory, sandbox, worker = [
            await self._events(stream) for stream in (ids.trajectory(name), ids.sandbox(name), ids.worker(WORKER))
        ]
        final = outcome.trajectory if outcome is not None else striker.view.trajectory
        return RunReport(
            trajectory=subject.name,
            label=label,
            wall_s=wall_s,
            turns=sum(isinstance(segment, Generation) for segment in final.segments),
            recoveries=[recovery_of(hit, trajectory, sandbox, worker) for hit in striker.struck],
            missed=list(striker.missed),
            cost=cost_of(trajectory, final),
            differences=differences,
            problem=problem,
        )

    async def _events(self, stream: ids.StreamId) -> list[Recorded]:
        return await Reader(self._stage.store, stream).catch_up()


def profile_of(undisturbed: TrajectoryState) -> Profile:
    """What failure plans are made from."""
    tokens = tuple(segment.count for segment in undisturbed.segments if isinstance(segment, Generation))
    return Profile(tokens, tuple(step.committed.duration_s for step in undisturbed.steps))


async def _left_behind(stage: Stage) -> list[str]:
    """Containers of the run that the actors have not removed in time; they are removed when the stage closes."""
    deadline = time.monotonic() + _REMOVED_S
    # Polled: Docker tells nobody.
    while (left := await stage.sandboxes.incarnations(stage.run)) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_EVERY_S)
    return left
