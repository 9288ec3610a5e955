"""One live container with its runner: where actions run.

The container's death is seen at once, by the pidfd of its process 1, and ends whatever waits for it with a
SandboxFailedError. A container that a dead checkpointer has left frozen is thawed by whoever waits for it here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from belayer.errors import SandboxFailedError
from belayer.processes import is_alive, wait_exit
from belayer.sandbox.answers import A, Last, Ran, adoption, saved
from belayer.sandbox.control import Channel
from belayer.sandbox.freezer import freezer_of
from belayer.sandbox.home import Home
from belayer.sandbox.protocol import Action, Incarnation, Observation

T = TypeVar("T")

ANSWER_S = 30.0
"""Beyond an action's own timeout: its kill, a checkpoint's frozen time, a slow machine."""
LEAST_OUTPUT_BYTES = 4096
"""A runner may say so much, whatever the limit of the action: that it could not start."""


class DockerSandbox:
    """Implements Sandbox. Made by `DockerHost.attach`."""

    def __init__(self, home: Home, incarnation: Incarnation, answer_s: float = ANSWER_S) -> None:
        self._home = home
        self._incarnation = incarnation
        self._answer_s = answer_s
        self._channel = Channel(incarnation.name, home.control_folder(incarnation.name))

    @property
    def incarnation(self) -> Incarnation:
        return self._incarnation

    async def run(self, action: Action) -> Observation:
        """Run the action, or return what it gave. SandboxFailedError when the container is dead or silent."""
        return await self._run({"kind": "run", "number": action.number}, action)

    async def set_up(self, command: str, timeout_s: float) -> Observation:
        """Run a command before the first action; it has no number."""
        return await self._run({"kind": "setup"}, Action(0, command, timeout_s))

    async def ping(self, timeout_s: float = ANSWER_S) -> int:
        """The number of the last action begun."""
        return (await self._ask({"kind": "ping"}, Last, timeout_s))[0].last

    async def state(self, timeout_s: float = ANSWER_S) -> bytes:
        """What the idle runner knows, for another to go on in its place; it holds as long as its marker is the same."""
        _, state = await self._ask({"kind": "state"}, Last, timeout_s)
        saved(self._incarnation.name, state)
        return state

    async def adopt(self, state: bytes, action: int, timeout_s: float = ANSWER_S) -> int:
        """Make a fresh runner go on from another's state, after `action`; the last action's number."""
        request = {"kind": "adopt", "state": adoption(saved(self._incarnation.name, state), action)}
        return (await self._ask(request, Last, timeout_s))[0].last

    async def wait_dead(self) -> str:
        """Return, with the evidence, once the container's process 1 is gone."""
        await wait_exit(self._incarnation.pid, self._incarnation.pid_start_ticks)
        return f"process 1 of the container (host pid {self._incarnation.pid}) ended"

    async def close(self) -> None:
        """Let go of the container without ending it."""
        self._channel.close()

    async def __aenter__(self) -> DockerSandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, request: dict[str, Any], action: Action) -> Observation:
        request |= {
            "command": action.command,
            "timeout_s": action.timeout_s,
            "output_limit_bytes": action.output_limit_bytes,
        }
        ran, output = await self._ask(request, Ran, action.timeout_s + self._answer_s)
        if len(output) > max(action.output_limit_bytes, LEAST_OUTPUT_BYTES):
            raise SandboxFailedError(self._incarnation.name, f"its runner gave {len(output):,} bytes of output")
        return Observation(ran.exit_status, output, ran.duration_s, ran.timed_out, ran.dropped_bytes)

    async def _ask(self, request: dict[str, Any], kind: type[A], timeout_s: float) -> tuple[A, bytes]:
        return await self._unless_dead(
            self._channel.ask(request, kind, timeout_s, lambda: thaw_abandoned(self._home, self._incarnation))
        )

    async def _unless_dead(self, work: Awaitable[T]) -> T:
        asked = asyncio.ensure_future(work)
        dead = asyncio.ensure_future(self.wait_dead())
        try:
            await asyncio.wait({asked, dead}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            raise SandboxFailedError(self._incarnation.name, dead.result())
        finally:
            for task in (asked, dead):
                if not task.done():
                    task.cancel()
                    with suppress(asyncio.CancelledError, SandboxFailedError):
                        await task


def thaw_abandoned(home: Home, incarnation: Incarnation) -> bool:
    """Thaw the container if it is frozen and nobody is at work on it: its checkpointer has died. Whether it was so."""
    if not is_alive(incarnation.pid, incarnation.pid_start_ticks):
        return False
    freezer = freezer_of(incarnation.pid)
    if freezer is None or not freezer.freezing:
        return False
    try:
        with home.locked(incarnation.name, timeout_s=0.0):
            freezer.thaw()
    except (TimeoutError, FileNotFoundError):
        return False
    return True
