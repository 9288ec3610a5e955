"""The rollout code of the demo: what someone writes who embeds Belayer in an agent loop.

Generate, read the command from the tokens that came, run it, show the model what it gave, until the work is handed in.
Everything is journaled as it happens, and nothing is remembered beside the journal: after any failure the loop opens
the trajectory again and goes on from its live prefix.

- engine gone: keep the journaled tokens, say so, resume on the next incarnation;
- container gone: say so, wait until it is restored and the trajectory resumed;
- epoch gone: recovery has the trajectory; open it again, which waits for its end;
- journal silent: try again until it answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass

from belayer import ids
from belayer.actors.reports import report_engine_failure, report_sandbox_failure
from belayer.actors.sandboxes import create_sandbox, incarnation_of, look
from belayer.actors.worker_recovery import process_of
from belayer.client import CHUNK_S, CHUNK_TOKENS, Trajectory
from belayer.demo.chat import Chat
from belayer.demo.waiting import RETRY_S, wait_until
from belayer.demo.witness import is_watched, watched
from belayer.errors import (
    BelayerError,
    EngineFailedError,
    FencedError,
    JournalUnavailableError,
    ProtocolError,
    SandboxFailedError,
    WrongSequenceError,
)
from belayer.gpu.protocol import Engine, EngineHost
from belayer.journal.columns import unpack_token_ids
from belayer.journal.events import SandboxSpec
from belayer.journal.store import JournalStore
from belayer.processes import is_alive
from belayer.projections import sandbox as sandbox_projection
from belayer.projections import worker as worker_projection
from belayer.projections.sandbox import SandboxState
from belayer.projections.trajectory import Generation, Step, TrajectoryState
from belayer.projections.worker import EngineState
from belayer.sandbox.protocol import Action, Incarnation, Sandbox, SandboxHost

BY = "rollout"
DYING_S = 1.0
TIMEOUT_FACTOR = 4.0
"""Recorded time-outs were set for larger machines. Here one would strike by load alone, and runs would differ by it."""

Collect = Callable[[Incarnation, TrajectoryState], Awaitable[None]]
"""Looks at the container once more after the last action, before it is removed."""


def _at_once(generation: int) -> float:
    return 0.0


async def _nothing(sandbox: Incarnation, action: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a rollout works with. `recovery_s` bounds every wait for a recovery; chunks as in `belayer.client`.

    `model_s`: how long generation n (from 1) must take at least. `before_action`: called before each action is run.
    `spare_workers` are asked, in order, once `worker` is excluded.
    """

    store: JournalStore
    sandboxes: SandboxHost
    engines: EngineHost
    worker: str
    run: str
    recovery_s: float = 60.0
    chunk_tokens: int = CHUNK_TOKENS
    chunk_s: float = CHUNK_S
    model_s: Callable[[int], float] = _at_once
    before_action: Callable[[Incarnation, int], Awaitable[None]] = _nothing
    spare_workers: Sequence[str] = ()


async def roll_out(around: Surroundings, name: str, chat: Chat, spec: SandboxSpec, collect: Collect) -> TrajectoryState:
    """Bring the trajectory to its end, from wherever the journal says that it is; its final state.

    TimeoutError when a recovery does not come, PrefixRefusedError when a generation was resumed wrongly.
    """
    async with Engines(around) as engines:
        silent_since: float | None = None
        failed: SandboxFailedError | None = None
        while True:
            try:
                if failed is not None:
                    await _report_sandbox(around, name, failed)
                    failed = None
                return await _Attempt(around, engines, name, chat, spec, collect).run()
            except (FencedError, WrongSequenceError):
                silent_since = None
            except SandboxFailedError as error:
                silent_since, failed = None, error
            except JournalUnavailableError:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > around.recovery_s:
                    raise
                await asyncio.sleep(RETRY_S)


class Engines:
    """Connections to engine incarnations, kept until the end of the rollout."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._connected: dict[str, Engine] = {}

    async def __aenter__(self) -> Engines:
        return self

    async def __aexit__(self, *_: object) -> None:
        for engine in self._connected.values():
            await engine.close()

    async def serving(self) -> tuple[str, EngineState]:
        """The first worker that is not excluded, and its main engine as soon as that is ready."""
        around = self._around
        for worker in (around.worker, *around.spare_workers):
            state = await wait_until(
                around.store,
                ids.worker(worker),
                worker_projection.fold,
                worker_projection.EMPTY,
                lambda state: state.serving is not None or state.excluded != "",
                "a ready engine",
                around.recovery_s,
            )
            if state.serving is not None:
                return worker, state.serving
        raise TimeoutError("every worker that this rollout may use is excluded; `belayer status` says why")

    def connect(self, engine: EngineState) -> Engine:
        incarnation = engine.registered.incarnation
        if incarnation not in self._connected:
            self._connected[incarnation] = self._around.engines.connect(process_of(engine))
        return self._connected[incarnation]

    async def report(self, worker: str, engine: EngineState, evidence: str) -> None:
        registered = engine.registered
        kind = "unreachable" if is_alive(registered.pid, registered.pid_start_ticks) else "died"
        await report_engine_failure(self._around.store, worker, registered.incarnation, kind, evidence, BY)


class _Attempt:
    """One opening of the trajectory, from its live prefix to its end or to the next failure."""

    def __init__(
        self, around: Surroundings, engines: Engines, name: str, chat: Chat, spec: SandboxSpec, collect: Collect
    ) -> None:
        self._around = around
        self._engines = engines
        self._name = name
        self._chat = chat
        self._spec = spec
        self._collect = collect

    async def run(self) -> TrajectoryState:
        around = self._around
        opened = await Trajectory.open(
            around.store,
            self._name,
            writer=BY,
            chunk_tokens=around.chunk_tokens,
            chunk_s=around.chunk_s,
            timeout_s=around.recovery_s,
        )
        async with AsyncExitStack() as stack:
            trajectory = await stack.enter_async_context(opened)
            if trajectory.state.phase == "empty":
                await trajectory.start(around.run, self._name, self._chat.prompt())
            if trajectory.state.phase != "open":
                return trajectory.state
            sandbox = await around.sandboxes.attach(await self._container())
            stack.push_async_callback(sandbox.close)
            await self._steps(trajectory, sandbox)
            return trajectory.state

    async def _container(self) -> Incarnation:
        """The trajectory's container, made if there never was one, waited for if it is being restored."""
        around = self._around
        if (await look(around.store, self._name)).phase == "none":
            await create_sandbox(around.store, around.sandboxes, around.run, self._name, self._spec, BY)
        state = await _wait_settled(around, self._name)
        if state.container is None or state.phase == "removed":
            raise ProtocolError(f"sandbox/{self._name} was removed while its trajectory went on")
        return incarnation_of(state.container)

    async def _steps(self, trajectory: Trajectory, sandbox: Sandbox) -> None:
        while True:
            said, steps = _last_turn(trajectory.state)
            if said is None or trajectory.state.generation is not None:
                await self._generate(trajectory)
                continue
            commands = self._chat.commands(said.number, said.token_ids())
            if commands is None:
                return await self._end(trajectory, sandbox, "the recording ended")
            if steps and self._chat.hands_in(_observation(steps[-1])):
                return await self._end(trajectory, sandbox, "submitted")
            if len(steps) < max(1, len(commands)):
                await self._act(trajectory, sandbox, commands, len(steps))
            else:
                await self._generate(trajectory)

    async def _generate(self, trajectory: Trajectory) -> None:
        """The next turn, from however many engines it takes."""
        while True:
            worker, engine = await self._engines.serving()
            offset = await trajectory.begin_generation(worker, engine.registered.incarnation)
            current = trajectory.state.generation
            assert current is not None
            if offset and self._chat.is_whole(current.number, current.token_ids()):
                return await trajectory.finish_generation(self._chat.finish_reason)
            request = f"{self._name}-g{current.number}-{offset}-{trajectory.state.sequence}"
            try:
                return await self._stream(trajectory, self._engines.connect(engine), request)
            except EngineFailedError as error:
                await trajectory.flush()
                await self._engines.report(worker, engine, error.evidence)

    async def _stream(self, trajectory: Trajectory, engine: Engine, request: str) -> None:
        current = trajectory.state.generation
        assert current is not None
        done_at = time.monotonic() + self._around.model_s(current.number)
        sampling = self._chat.sampling(current.number, current.count)
        async with aclosing(engine.generate(request, trajectory.state.context(), sampling)) as batches:
            async for batch in batches:
                if batch.token_ids:
                    await trajectory.append_tokens(batch.token_ids, batch.logprobs, batch.weight_version)
                if batch.finish_reason is not None:
                    await asyncio.sleep(done_at - time.monotonic())
                    await trajectory.finish_generation(batch.finish_reason)

    async def _act(self, trajectory: Trajectory, sandbox: Sandbox, commands: list[str], index: int) -> None:
        """Run the turn's next command. A turn without one does nothing: so its reply is at a boundary as well."""
        command = commands[index] if commands else ":"
        timeout_s = self._chat.recording.timeout_s * TIMEOUT_FACTOR
        number = await trajectory.start_action(command, timeout_s, sandbox.incarnation.name)
        await self._around.before_action(sandbox.incarnation, number)
        asked = watched(number, command) if is_watched(self._spec) else command
        seen = await sandbox.run(Action(number, asked, timeout_s))
        observation = self._chat.no_command()
        if commands:
            observation = self._chat.observation(
                seen.exit_status,
                seen.output,
                timed_out=seen.timed_out,
                dropped_bytes=seen.dropped_bytes,
                last=index + 1 == len(commands),
            )
        digest = hashlib.blake2b(seen.output, digest_size=16).digest()
        await trajectory.commit_action(
            seen.exit_status, observation, digest, seen.duration_s, seen.timed_out, seen.dropped_bytes
        )

    async def _end(self, trajectory: Trajectory, sandbox: Sandbox, reason: str) -> None:
        problem: Exception | None = None
        try:
            await self._collect(sandbox.incarnation, trajectory.state)
        except (BelayerError, OSError) as error:
            problem = error  # a container that is dying cannot be read any more a moment before it counts as dead
            with suppress(TimeoutError):
                await asyncio.wait_for(sandbox.wait_dead(), DYING_S)
        if not await self._around.sandboxes.is_alive(sandbox.incarnation):
            raise SandboxFailedError(sandbox.incarnation.name, "it died while its final state was read")
        if problem is not None:
            raise problem
        await trajectory.finish(reason)


async def _report_sandbox(around: Surroundings, name: str, error: SandboxFailedError) -> None:
    """Say that the container failed, if nobody has, and wait until it is replaced."""
    state = await look(around.store, name)
    if state.incarnation != error.incarnation:
        return
    kind = "unreachable"
    if state.container is not None and not is_alive(state.container.pid, state.container.pid_start_ticks):
        kind = "died"
    await report_sandbox_failure(around.store, name, error.incarnation, kind, error.evidence, BY)
    await _wait_settled(around, name)


async def _wait_settled(around: Surroundings, name: str) -> SandboxState:
    """The sandbox's state as soon as it is live, or gone for good."""
    return await wait_until(
        around.store,
        ids.sandbox(name),
        sandbox_projection.fold,
        sandbox_projection.EMPTY,
        lambda state: state.phase in ("live", "removed"),
        "a live container",
        around.recovery_s,
    )


def _last_turn(state: TrajectoryState) -> tuple[Generation | None, list[Step]]:
    """The newest finished generation of the live prefix and the actions after it."""
    steps: list[Step] = []
    for segment in reversed(state.segments):
        match segment:
            case Generation():
                return segment, steps[::-1]
            case Step():
                steps.append(segment)
    return None, []


def _observation(step: Step) -> list[int]:
    return unpack_token_ids(step.committed.observation)
