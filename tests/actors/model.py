"""A model of the world in which actors work: a sandbox host in memory, and a fuse that strikes between any two steps.

The model host keeps the Protocol's promises exactly (at-most-once actions, half a checkpoint never visible); the real
host is tested against Docker and CRIU in tests/sandbox. Its environment is the list of actions that changed it, so an
action that is lost, repeated or run in the wrong environment shows in the next observation. Actions that only look
change nothing, so that a checkpoint may hold several boundaries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from belayer.errors import CheckpointRefusedError, RestoreFailedError, SandboxFailedError
from belayer.journal.events import SandboxSpec
from belayer.sandbox.protocol import Action, CheckpointReport, Incarnation, Observation


class CrashError(BaseException):
    """The process that was at work is dead at this instant: nobody handles it."""


class Fuse:
    """Counts steps (calls that reach the outside); at step `at` it strikes once, before or after the call's effect."""

    def __init__(self) -> None:
        self._left = -1
        self._after = False
        self._strike: Callable[[], Awaitable[None]] | None = None

    def set(self, at: int, after: bool, strike: Callable[[], Awaitable[None]]) -> None:
        self._left, self._after, self._strike = at, after, strike

    def clear(self) -> None:
        self._left, self._strike = -1, None

    async def step(self, call: Callable[[], Awaitable[Any]]) -> Any:
        if self._strike is None:
            return await call()
        self._left -= 1
        if self._left >= 0:
            return await call()
        strike = self._strike
        self.clear()
        if not self._after:
            await strike()
            return await call()
        result = await call()
        await strike()
        return result


class Fused:
    """Any object whose coroutine methods pass through the fuse."""

    def __init__(self, inner: Any, fuse: Fuse) -> None:
        self._inner = inner
        self._fuse = fuse

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._fuse.step(lambda: method(*args, **kwargs))

        return call if callable(method) else method


def changes(command: str) -> bool:
    """Whether the command does anything to its environment."""
    return not command.startswith("look")


@dataclass
class Container:
    """One model container: `actions`, those that changed it, is its whole state; `last` what its runner counts."""

    incarnation: Incarnation
    run: str
    actions: list[str] = field(default_factory=list)
    last: int = 0
    results: dict[int, Observation] = field(default_factory=dict)
    alive: bool = True


class ModelSandbox:
    """A handle on a model container."""

    def __init__(self, container: Container) -> None:
        self._container = container

    @property
    def incarnation(self) -> Incarnation:
        return self._container.incarnation

    async def run(self, action: Action) -> Observation:
        container = self._container
        if not container.alive:
            raise SandboxFailedError(container.incarnation.name, "dead")
        if action.number not in container.results:
            assert action.number == container.last + 1, "an action ran in the wrong environment"
            container.last = action.number
            if changes(action.command):
                container.actions.append(action.command)
            output = hashlib.blake2b(repr((container.actions, action)).encode(), digest_size=4).digest()
            container.results[action.number] = Observation(0, output, 0.1)
        return container.results[action.number]

    async def wait_dead(self) -> str:
        """A model container's death is seen at the next action."""
        raise TimeoutError

    async def close(self) -> None:
        """Nothing to let go of."""


class ModelHost:
    """A SandboxHost in memory."""

    def __init__(self) -> None:
        self.containers: dict[str, Container] = {}
        self.saved: dict[str, Container] = {}
        self._pid = 0

    async def create(self, run: str, trajectory: str, incarnation: str, spec: SandboxSpec) -> Incarnation:
        self._pid += 1
        made = Incarnation(incarnation, f"id-{incarnation}", spec.image, "host", self._pid, self._pid)
        self.containers[incarnation] = Container(made, run)
        return made

    async def attach(self, incarnation: Incarnation) -> ModelSandbox:
        container = self.containers.get(incarnation.name)
        if container is None or not container.alive:
            raise SandboxFailedError(incarnation.name, "dead")
        return ModelSandbox(container)

    async def is_alive(self, incarnation: Incarnation) -> bool:
        container = self.containers.get(incarnation.name)
        return container is not None and container.alive

    async def checkpoint(
        self, incarnation: Incarnation, checkpoint: str, action: int, since: str = "", hold: bool = False
    ) -> CheckpointReport:
        container = self.containers.get(incarnation.name)
        if container is None or not container.alive:
            raise SandboxFailedError(incarnation.name, "dead")
        if container.last != action:
            raise CheckpointRefusedError(incarnation.name, "it has moved on")
        before = self.saved.get(since)
        if before is not None and before.actions == container.actions:
            return CheckpointReport(0, 0.0, 0.0, since)
        self.saved[checkpoint] = self._copy(container)
        return CheckpointReport(1, 0.0, 0.0)

    async def restore(
        self, run: str, trajectory: str, incarnation: str, spec: SandboxSpec, checkpoint: str, action: int
    ) -> Incarnation:
        if checkpoint not in self.saved:
            raise RestoreFailedError(checkpoint, "it is gone")
        made = await self.create(run, trajectory, incarnation, spec)
        saved = self.saved[checkpoint]
        assert action >= saved.last, "a boundary that the checkpoint does not hold"
        self.containers[incarnation] = replace(self._copy(saved), incarnation=made, run=run, last=action)
        return made

    def _copy(self, container: Container) -> Container:
        return replace(container, actions=list(container.actions), results=dict(container.results))

    async def remove(self, incarnation: str) -> None:
        if container := self.containers.pop(incarnation, None):
            container.alive = False

    async def remove_checkpoint(self, checkpoint: str) -> None:
        self.saved.pop(checkpoint, None)

    def in_use(self, checkpoint: str) -> AbstractContextManager[None]:
        return nullcontext()

    async def remove_run(self, run: str) -> None:
        for name in await self.incarnations(run):
            await self.remove(name)
        for name in [name for name, saved in self.saved.items() if saved.run == run]:
            await self.remove_checkpoint(name)

    async def incarnations(self, run: str | None = None) -> list[str]:
        return [name for name, container in self.containers.items() if run in (None, container.run)]

    async def checkpoints(self, run: str | None = None) -> list[str]:
        return [name for name, saved in self.saved.items() if run in (None, saved.run)]

    def checkpoint_path(self, checkpoint: str) -> Path:
        raise NotImplementedError("a model has no files")
