"""What the rest of Belayer needs of sandboxes. One implementation is real: Docker and CRIU.

A sandbox is one container incarnation serving one trajectory. Its runner takes numbered actions and runs each number at
most once ever; asked for a number again, it answers with what that action gave. A dead or silent container is a
SandboxFailedError, never an observation.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from belayer.journal.events import LeftOut, SandboxSpec


@dataclass(frozen=True, slots=True)
class Action:
    """One numbered command, run by `bash -c` in a new session of its own."""

    number: int
    command: str
    timeout_s: float = 60.0
    output_limit_bytes: int = 1 << 20
    """Beyond it the middle of the output is dropped and counted."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an action gave: stdout and stderr as one stream, as the terminal would have shown it."""

    exit_status: int
    """The command's own; 128 + n when signal n ended it; 124 when it timed out."""
    output: bytes
    duration_s: float
    timed_out: bool = False
    dropped_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Incarnation:
    """A running container of a trajectory, as another process can find it."""

    name: str
    """The container's name in Docker; also what events call the incarnation."""
    container_id: str
    image_digest: str
    host: str
    pid: int
    """The container's process 1 on its host."""
    pid_start_ticks: int
    """Its start time, so that a reused pid is not taken for it."""


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """A checkpoint: what it cost."""

    size_bytes: int
    frozen_s: float
    total_s: float
    held_by: str = ""
    """Not empty: nothing was captured, for that earlier checkpoint still describes the container."""
    not_captured: tuple[str, ...] = ()
    """Mount points of the host's folders and volumes, whose contents a checkpoint leaves out."""
    stored_bytes: int = 0
    """What it added to the disk; `size_bytes` counts what it shares with other checkpoints, too."""
    left_out: tuple[LeftOut, ...] = ()
    """Not empty: a process could not be captured, so the files alone were. All that is not in it."""


class Sandbox(Protocol):
    """A live incarnation in which actions run."""

    @property
    def incarnation(self) -> Incarnation: ...

    async def run(self, action: Action) -> Observation:
        """Run the action, or return what it gave if its number has run. SandboxFailedError when the sandbox is gone."""
        ...

    async def wait_dead(self) -> str:
        """Return, with the evidence, once the container's process 1 is gone."""
        ...

    async def close(self) -> None:
        """Let go of the container without ending it."""
        ...


class SandboxHost(Protocol):
    """Makes, finds, captures and removes the containers of this machine."""

    async def create(self, run: str, trajectory: str, incarnation: str, spec: SandboxSpec) -> Incarnation:
        """A fresh container at boundary 0, its setup done. Repeating it with the same name replaces what is there."""
        ...

    async def attach(self, incarnation: Incarnation) -> Sandbox:
        """The live sandbox. SandboxFailedError when it is not alive."""
        ...

    async def is_alive(self, incarnation: Incarnation) -> bool:
        """Whether the container's process 1 runs (the same one: pid and start time)."""
        ...

    async def checkpoint(
        self, incarnation: Incarnation, checkpoint: str, action: int, since: str = "", hold: bool = False
    ) -> CheckpointReport:
        """full_checkpoint: freeze, verify that the runner is idle after `action`, capture layer and processes, publish.

        `since`: an earlier checkpoint of this container, or that it was restored from. When nothing but the runner's
        count of actions has changed since, nothing is captured and the report says so. `hold`: freeze it before all
        preparations, so that an action that comes meanwhile waits for the capture instead of making it void.
        CheckpointRefusedError: not in that state, nothing is left. CheckpointFailedError: given up, nothing is left.
        """
        ...

    async def restore(
        self, run: str, trajectory: str, incarnation: str, spec: SandboxSpec, checkpoint: str, action: int
    ) -> Incarnation:
        """full_restore into a new container of the same image, probed. RestoreFailedError: nothing is left of it.
        HostUnfitError: neither, and the machine is at fault, for the moment.

        `action`: the last one that has run, of those whose boundaries the checkpoint holds.
        """
        ...

    async def remove(self, incarnation: str) -> None:
        """Kill and remove the container and its folders, whatever state they are in. Nothing there is fine."""
        ...

    async def remove_checkpoint(self, checkpoint: str) -> None:
        """Remove a checkpoint's files, at once or when nobody uses them any more. Nothing there is fine."""
        ...

    def in_use(self, checkpoint: str) -> AbstractContextManager[None]:
        """Keep a checkpoint's files until the end, whoever removes it meanwhile. None there is fine."""
        ...

    async def remove_run(self, run: str) -> None:
        """Remove every container and checkpoint here that is labelled with the run. Needs no journal."""
        ...

    async def incarnations(self, run: str | None = None) -> list[str]:
        """Names of all containers of ours here (of one run), dead or alive."""
        ...

    async def checkpoints(self, run: str | None = None) -> list[str]:
        """All published checkpoints here (of one run)."""
        ...

    def checkpoint_path(self, checkpoint: str) -> Path:
        """Where a published checkpoint lies."""
        ...
