"""Runs of recorded trajectories on a stage: undisturbed, or with failures and then compared with the undisturbed one.

A run that does not come to its end is reported as such and does not stop the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from belayer import ids
from belayer.demo.agent import Surroundings, roll_out
from belayer.demo.compare import Difference, Outcome, check_witness, compare
from belayer.demo.container_state import ContainerState
from belayer.demo.failures import Kind, Planned, Profile, plan_failures
from belayer.demo.measures import cost_of, recovery_of
from belayer.demo.report import RunReport
from belayer.demo.results import journal_name
from belayer.demo.stage import WORKER, Stage
from belayer.demo.strikes import Striker
from belayer.demo.subjects import Subject
from belayer.demo.view import View, watching
from belayer.demo.witness import is_watched
from belayer.errors import BelayerError, InputError
from belayer.journal.codec import Recorded
from belayer.journal.writer import Reader
from belayer.projections.trajectory import Generation, TrajectoryState
from belayer.sandbox.protocol import Incarnation

UNDISTURBED = "undisturbed"
CHUNK_TOKENS = 16
CHUNK_S = 0.02
"""Smaller chunks than usual: turns are short here, and failures are aimed at what the journal shows of them."""
ENDED_S = 30.0


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


class Runs:
    """The runs of one stage, `parallel` of them at a time."""

    def __init__(self, stage: Stage, board: Board, seed: int, kinds: Sequence[Kind], parallel: int) -> None:
        self._stage = stage
        self._board = board
        self._seed = seed
        self._kinds = kinds
        self._slots = asyncio.Semaphore(parallel)
        self._redis = asyncio.Lock()

    async def undisturbed(self, subject: Subject, label: str = UNDISTURBED) -> tuple[RunReport, Outcome | None]:
        """What the others are compared with; None when even that went wrong."""
        report, outcome = await self._run(subject, label, (), None)
        return report, None if report.problem else outcome

    async def disturbed(self, subject: Subject, undisturbed: Outcome, number: int) -> RunReport:
        """A run with failures, compared with the undisturbed one."""
        name = f"{subject.name}/{number}"
        label = f"failures {number}"
        try:
            plan = plan_failures(self._seed, name, self._kinds, profile_of(undisturbed.trajectory))
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
            recovery_s=stage.deadlines.recovery_s,
            chunk_tokens=CHUNK_TOKENS,
            chunk_s=CHUNK_S,
        )
        name = journal_name(subject.name, stage.run, label)
        collected: list[ContainerState] = []

        async def collect(incarnation: Incarnation, state: TrajectoryState) -> None:
            collected.append(await stage.reader.read(incarnation.pid, watched=is_watched(subject.spec)))

        async with self._slots, watching(stage.store, name) as view:
            started = time.monotonic()
            striker = Striker(stage, view, self._redis)
            turns = len(subject.chat.recording.turns)
            self._board.row(subject.name, label, turns, view, lambda: len(striker.struck), len(plan))
            striking = asyncio.create_task(striker.strike_all(plan))
            outcome, problem = None, ""
            try:
                final = await roll_out(around, name, subject.chat, subject.spec, collect)
                await view.until(lambda view: view.ended, ENDED_S)
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
