"""The agent loop against real engine processes and real actors; the sandbox is the model of tests/actors."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from belayer import ids
from belayer.actors.actor import Actor, run_actor
from belayer.actors.checkpointer import Checkpointer
from belayer.actors.recovery import Recovery
from belayer.actors.reports import report_engine_failure
from belayer.actors.sandbox_recovery import SandboxRecovery
from belayer.actors.sandboxes import look
from belayer.actors.worker_recovery import WorkerRecovery, process_of
from belayer.actors.worker_recovery import look as look_worker
from belayer.client import Trajectory
from belayer.demo.agent import Surroundings, roll_out
from belayer.demo.chat import Chat
from belayer.demo.recording import Message, Recording, Turn
from belayer.demo.witness import WitnessError
from belayer.gpu.recorded_host import RecordedEngineHost
from belayer.journal.events import ActionStarted, GenerationResumed, SandboxSpec, TokensAppended
from belayer.journal.memory_store import MemoryStore
from belayer.journal.writer import Reader
from belayer.processes import host_name
from belayer.projections import trajectory as projection
from belayer.projections.trajectory import Generation, TrajectoryState
from belayer.sandbox.protocol import Incarnation
from tests.actors.model import ModelHost
from tests.waiting import DEADLINE_S, until, within

RECORDING = Recording(
    "toy__toy-1",
    (Message("system", "You help."), Message("user", "Fix it.")),
    (
        Turn("I will look at the code first, then at the tests.", ("ls -la", "cat tests.py")),
        Turn("Nothing to run yet, let me think about it."),
        Turn("Now I edit the file that is wrong.", ("sed -i s/a/b/ code.py",)),
        Turn(
            "Does it work now? I run the tests again, every single one of them: something else may be broken, and "
            "whoever changes code without looking around is soon surprised.",
            ("python -m pytest",),
        ),
    ),
)
SPEC = SandboxSpec("image")
HOST = "host"


class World:
    """Engines, actors and a model sandbox around one trajectory."""

    def __init__(self, folder: Path) -> None:
        self.store = MemoryStore()
        self.sandboxes = ModelHost()
        self.chat = Chat(RECORDING)
        self.chat.write_token_recording(folder)
        self.held = folder / "hold"
        self.engines = RecordedEngineHost(
            folder, folder / "log", owner_pid=os.getpid(), tokens_per_s=300, silence_s=DEADLINE_S, hold=self.held
        )
        self.workers = WorkerRecovery(self.store, self.engines, host_name(), "test")
        self.around = Surroundings(self.store, self.sandboxes, self.engines, "w", "run", recovery_s=DEADLINE_S)
        self.collected: list[Incarnation] = []
        self.dies_at_the_end = False

    async def roll_out(self) -> TrajectoryState:
        return await roll_out(self.around, RECORDING.name, self.chat, SPEC, self._collect)

    async def _collect(self, incarnation: Incarnation, state: TrajectoryState) -> None:
        self.collected.append(incarnation)
        if self.dies_at_the_end and len(self.collected) == 1:
            self.sandboxes.containers[incarnation.name].alive = False
            raise WitnessError("gone")

    async def reached(self, reached: Callable[[TrajectoryState], bool]) -> TrajectoryState:
        """The trajectory's state as soon as the journal says so."""
        reader = Reader(self.store, ids.trajectory(RECORDING.name))
        state = projection.EMPTY
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for recorded in await reader.catch_up():
                    state = projection.evolve(state, recorded.sequence, recorded.event)
                    if reached(state):
                        return state
                await reader.wait(DEADLINE_S)

    async def shadow_armed(self) -> bool:
        return (await look_worker(self.store, "w")).shadow is not None

    async def events(self, kind: type) -> list[object]:
        history = await Reader(self.store, ids.trajectory(RECORDING.name)).catch_up()
        return [recorded.event for recorded in history if isinstance(recorded.event, kind)]


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    made = World(folder)
    actors: list[Actor] = [
        Checkpointer(made.store, made.sandboxes, HOST, "checkpointer"),
        Recovery(SandboxRecovery(made.store, made.sandboxes, HOST, "recovery"), made.workers),
    ]
    running = [asyncio.create_task(run_actor(made.store, actor, HOST, "c1")) for actor in actors]
    try:
        await made.workers.start("w", "run")
        await until(lambda: made.shadow_armed(), what="a shadow")
        yield made
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for engine in (await look_worker(made.store, "w")).engines.values():
            await made.engines.kill(process_of(engine))


def _said(state: TrajectoryState) -> list[tuple[list[int], list[float]]]:
    return [(said.token_ids(), said.logprobs()) for said in state.segments if isinstance(said, Generation)]


def _seen(state: TrajectoryState) -> list[tuple[str, bytes]]:
    return [(step.started.command, step.committed.observation) for step in state.steps]


async def test_a_rollout_says_and_does_what_was_recorded(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        state = await here.roll_out()
        assert (state.phase, state.reason) == ("finished", "the recording ended")
        assert [tokens for tokens, _ in _said(state)] == [*(here.chat.turn(turn) for turn in RECORDING.turns), [261]]
        commands = [step.started.command for step in state.steps]
        assert commands == ["ls -la", "cat tests.py", ":", "sed -i s/a/b/ code.py", "python -m pytest"]
        assert len(here.collected) == 1 and not state.rewinds


async def test_a_container_that_dies_while_its_final_state_is_read_comes_back(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.dies_at_the_end = True
        state = await within(here.roll_out())
        assert state.phase == "finished"
        assert len({incarnation.name for incarnation in here.collected}) == 2


async def _kill_engine(here: World) -> None:
    serving = (await look_worker(here.store, "w")).serving
    assert serving is not None
    os.kill(serving.registered.pid, signal.SIGKILL)


async def _kill_container(here: World) -> None:
    here.sandboxes.containers[(await look(here.store, RECORDING.name)).incarnation].alive = False


async def _take_epoch(here: World) -> None:
    opened = await Trajectory.open(here.store, RECORDING.name, writer="somebody else")
    await opened.close()


def _in_generation(number: int) -> Callable[[TrajectoryState], bool]:
    return lambda state: (
        state.generation is not None and state.generation.number == number and state.generation.count > 3
    )


def _in_action(number: int) -> Callable[[TrajectoryState], bool]:
    return lambda state: state.action is not None and state.action.action == number


@pytest.mark.parametrize("strike", [_kill_engine, _kill_container, _take_epoch])
@pytest.mark.parametrize("at", [_in_generation(1), _in_generation(4), _in_action(2)])
async def test_a_rollout_ends_the_same_after_a_failure(
    tmp_path: Path, strike: Callable[[World], Awaitable[None]], at: Callable[[TrajectoryState], bool]
) -> None:
    async with world(tmp_path) as here:
        undisturbed = await here.roll_out()
    async with world(tmp_path) as here:
        rolling = asyncio.create_task(here.roll_out())
        await here.reached(at)
        await strike(here)
        state = await within(rolling)
        assert _said(state) == _said(undisturbed)
        assert _seen(state) == _seen(undisturbed)
        assert state.reason == undisturbed.reason
        container = here.sandboxes.containers[(await look(here.store, RECORDING.name)).incarnation]
        assert len(container.actions) == len(_seen(state)), "an action was lost or ran twice"
        if strike is _kill_engine:
            assert (await look_worker(here.store, "w")).handovers == 1
            assert len(await here.events(ActionStarted)) == len(_seen(state)), "an engine's death reran an action"
            appended = [event for event in await here.events(TokensAppended) if isinstance(event, TokensAppended)]
            assert sum(event.count for event in appended) == sum(len(tokens) for tokens, _ in _said(state))


async def test_when_a_worker_is_excluded_its_requests_go_on_at_another(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        undisturbed = await here.roll_out()
    async with world(tmp_path) as here:
        await here.workers.start("other", "run")
        here.around = replace(here.around, spare_workers=("other",))
        *others, longest = (len(here.chat.turn(turn)) for turn in RECORDING.turns)
        assert max(others) + 5 < longest
        here.held.write_text(str(max(others) + 5))  # so that it is in its midst for as long as this takes
        rolling = asyncio.create_task(here.roll_out())
        await here.reached(_in_generation(4))
        main = (await look_worker(here.store, "w")).main
        await report_engine_failure(here.store, "w", main, "gpu", "XID 79", "test")
        await _kill_all_of(here, "w")
        here.held.unlink()
        state = await within(rolling)
        assert _said(state) == _said(undisturbed) and _seen(state) == _seen(undisturbed)
        resumed = [event for event in await here.events(GenerationResumed) if isinstance(event, GenerationResumed)]
        assert [event.worker for event in resumed] == ["other"]
        assert all(event.incarnation != main for event in resumed)
        for engine in (await look_worker(here.store, "other")).engines.values():
            await here.engines.kill(process_of(engine))


async def _kill_all_of(here: World, worker: str) -> None:
    for engine in (await look_worker(here.store, worker)).engines.values():
        await here.engines.kill(process_of(engine))
