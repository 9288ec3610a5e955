"""Turns the journal's words for containers into the sandbox's own, and makes the first container of a trajectory."""

from __future__ import annotations

import re

from belayer import ids
from belayer.errors import FencedError, ProtocolError
from belayer.journal.events import SandboxCreated, SandboxRestored, SandboxSpec
from belayer.journal.store import JournalStore
from belayer.journal.writer import Reader, take_over
from belayer.projections.sandbox import SandboxState, fold
from belayer.sandbox.protocol import Incarnation, SandboxHost


def incarnation_name(trajectory: str, epoch: int, attempt: int = 0) -> str:
    """A name for a container, used once: also where another journal has a trajectory of that name on this machine."""
    return f"belayer-{trajectory}-e{epoch}" + (f"-{attempt}" if attempt else "") + f"-{ids.new_suffix()}"


def incarnation_epoch(trajectory: str, incarnation: str) -> int:
    """The epoch in a container's name; -1 when it is not one of this trajectory's."""
    found = re.fullmatch(rf"belayer-{re.escape(trajectory)}-e(\d+)(-\d+)?(-[0-9a-f]{{8}})?", incarnation)
    return int(found[1]) if found else -1


def checkpoint_name(trajectory: str, boundary: int, epoch: int) -> str:
    """A name for a checkpoint, used once: boundaries of superseded branches and other journals have the same number."""
    return f"{trajectory}-b{boundary}-e{epoch}-{ids.new_suffix()}"


def is_checkpoint_of(trajectory: str, checkpoint: str) -> bool:
    """Whether the checkpoint is one of this trajectory's."""
    return re.fullmatch(rf"{re.escape(trajectory)}-b\d+-e\d+(-[0-9a-f]{{8}})?", checkpoint) is not None


def incarnation_of(container: SandboxCreated | SandboxRestored) -> Incarnation:
    """The container as the sandbox package knows it."""
    return Incarnation(
        name=container.incarnation,
        container_id=container.container_id,
        image_digest=container.image_digest,
        host=container.host,
        pid=container.pid,
        pid_start_ticks=container.pid_start_ticks,
    )


async def create_sandbox(
    store: JournalStore, host: SandboxHost, run: str, trajectory: str, spec: SandboxSpec, by: str
) -> SandboxState:
    """Make the trajectory's first container. One that the journal already knows is left as it is, and whoever captures
    or recovers it undisturbed."""
    state = await look(store, trajectory)
    if state.phase == "none":
        writer, history = await take_over(store, ids.sandbox(trajectory), by)
        state = fold(history)
        if state.phase == "none":
            made = await host.create(run, trajectory, incarnation_name(trajectory, writer.epoch), spec)
            try:
                await writer.append(created(made, run, spec))
            except FencedError:
                await host.remove(made.name)
                raise
            return await look(store, trajectory)
    if state.run != run:
        raise ProtocolError(f"sandbox/{trajectory} belongs to run {state.run!r}, not to {run!r}; choose another name")
    return state


async def look(store: JournalStore, trajectory: str) -> SandboxState:
    """The sandbox's state as of now."""
    return fold(await Reader(store, ids.sandbox(trajectory), from_mark=True).catch_up())


def created(made: Incarnation, run: str, spec: SandboxSpec) -> SandboxCreated:
    """The event that says so."""
    return SandboxCreated(
        made.name, made.container_id, made.image_digest, made.host, made.pid, made.pid_start_ticks, run, spec
    )
