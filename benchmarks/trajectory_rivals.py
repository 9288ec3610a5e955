"""The same rollouts without Belayer: what survives a lost container by starting again, or by replaying all actions.

The loop is that of `belayer.demo.agent` without a journal: what it knows is in its memory, and there are no
checkpoints. A failure is seen at once, as Belayer sees it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Literal

from belayer.demo.agent import TIMEOUT_FACTOR, Engines, Surroundings
from belayer.demo.subjects import Subject
from belayer.errors import SandboxFailedError
from belayer.gpu.protocol import Engine
from belayer.processes import kill
from belayer.sandbox.protocol import Action, Observation, Sandbox

Way = Literal["restart", "replay"]


class Alone:
    """One rollout. In action `doomed` (0: in none) its container dies, once."""

    def __init__(self, around: Surroundings, name: str, subject: Subject, way: Way, doomed: int = 0) -> None:
        self._around = around
        self._name = name
        self._subject = subject
        self._way = way
        self._doomed = doomed
        self._died_s = 0.0
        self._forget()
        self.wall_s = 0.0
        self.lost_s = 0.0
        """From the begin of the action that failed to its end after all, less the time that it then took."""

    @property
    def actions(self) -> int:
        """How many actions the finished trajectory has."""
        return len(self._done)

    async def run(self) -> None:
        """Bring the trajectory to its end, whatever it takes."""
        started = time.monotonic()
        async with Engines(self._around) as engines:
            engine = engines.connect((await engines.serving())[1])
            attempt = 1
            while not await self._attempt(engine, f"belayer-{self._name}-e{attempt}"):
                attempt += 1
                if self._way == "restart":
                    self._forget()
        self.wall_s = time.monotonic() - started

    def _forget(self) -> None:
        self._context = self._subject.chat.prompt()
        self._turn = 0
        self._pending: Sequence[str] = ()
        self._done: list[str] = []

    async def _attempt(self, engine: Engine, incarnation: str) -> bool:
        """Go on in a new container; False when it died."""
        host, around = self._around.sandboxes, self._around
        sandbox = await host.attach(await host.create(around.run, self._name, incarnation, self._subject.spec))
        try:
            for number, command in enumerate(self._done, 1):
                await self._ask(sandbox, number, command)
            await self._go_on(engine, sandbox)
        except SandboxFailedError:
            return False
        finally:
            await sandbox.close()
            await host.remove(incarnation)
        return True

    async def _go_on(self, engine: Engine, sandbox: Sandbox) -> None:
        chat = self._subject.chat
        while True:
            if not self._pending:
                said = await self._generate(engine)
                commands = chat.commands(self._turn, said)
                if commands is None:
                    return
                self._pending = commands or ("",)
            observation = chat.no_command()
            while self._pending:
                command, *rest = self._pending
                seen = await self._act(sandbox, command)
                if command:
                    observation = chat.observation(
                        seen.exit_status,
                        seen.output,
                        timed_out=seen.timed_out,
                        dropped_bytes=seen.dropped_bytes,
                        last=not rest,
                    )
                self._context += observation
                self._pending = rest
            if chat.hands_in(observation):
                return

    async def _generate(self, engine: Engine) -> list[int]:
        self._turn += 1
        done_at = time.monotonic() + self._around.model_s(self._turn)
        tokens: list[int] = []
        request = f"{self._name}-{self._turn}-{time.monotonic_ns()}"
        sampling = self._subject.chat.sampling(self._turn, 0)
        async with aclosing(engine.generate(request, self._context, sampling)) as batches:
            async for batch in batches:
                tokens += batch.token_ids
        await asyncio.sleep(done_at - time.monotonic())
        self._context += tokens
        return tokens

    async def _act(self, sandbox: Sandbox, command: str) -> Observation:
        number = len(self._done) + 1
        if number == self._doomed and not self._died_s:
            self._died_s = time.monotonic()
            await kill(sandbox.incarnation.pid, sandbox.incarnation.pid_start_ticks)
        seen = await self._ask(sandbox, number, command)
        if number == self._doomed and not self.lost_s:
            self.lost_s = time.monotonic() - self._died_s - seen.duration_s
        self._done.append(command)
        return seen

    async def _ask(self, sandbox: Sandbox, number: int, command: str) -> Observation:
        timeout_s = self._subject.chat.recording.timeout_s * TIMEOUT_FACTOR
        return await sandbox.run(Action(number, command or ":", timeout_s))
