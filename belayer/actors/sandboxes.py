"""Turns the journal's words for containers into the sandbox's own, and makes the first container of a trajectory."""

from __future__ import annotations

import re

from belayer import ids
from belayer.errors import ProtocolError
from belayer.journal.events import SandboxCreated, SandboxRestored, SandboxSpec
from belayer.journal.store import JournalStore
from belayer.journal.writer import Reader, take_over
from belayer.projections.sandbox import SandboxState, fold
from belayer.sandbox.protocol import Incarnation, SandboxHost


def incarnation_name(trajectory: str, epoch: int, attempt: int = 0) -> str:
    """The container's name. An epoch is taken once, so no two recoveries ever use one name."""
    return f"belayer-{trajectory}-e{epoch}" + (f"-{attempt}" if attempt else "")


def incarnation_epoch(trajectory: str, incarnation: str) -> int:
    """The epoch in a container's name; -1 when it is not one of this trajectory's."""
    found = re.fullmatch(rf"belayer-{re.escape(trajectory)}-e(\d+)(-\d+)?", incarnation)
    return int(found[1]) if found else -1


def checkpoint_name(trajectory: str, boundary: int, epoch: int) -> str:
    """The checkpoint's name; the epoch keeps those of superseded branches apart."""
    return f"{trajectory}-b{boundary}-e{epoch}"


def is_checkpoint_of(trajectory: str, checkpoint: str) -> bool:
    """Whether the checkpoint is one of this trajectory's."""
    return re.fullmatch(rf"{re.escape(trajectory)}-b\d+-e\d+", checkpoint) is not None


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
    """Make the trajectory's first container. One that the journal already knows is left as it is."""
    writer, history = await take_over(store, ids.sandbox(trajectory), by)
    state = fold(history)
    if state.phase != "none":
        if state.run != run:
            raise ProtocolError(
                f"sandbox/{trajectory} belongs to run {state.run!r}, not to {run!r}; choose another name"
            )
        return state
    made = await host.create(run, trajectory, incarnation_name(trajectory, writer.epoch), spec)
    await writer.append(created(made, run, spec))
    return await look(store, trajectory)


async def look(store: JournalStore, trajectory: str) -> SandboxState:
    """The sandbox's state as of now."""
    return fold(await Reader(store, ids.sandbox(trajectory), from_mark=True).catch_up())


def created(made: Incarnation, run: str, spec: SandboxSpec) -> SandboxCreated:
    """The event that says so."""
    return SandboxCreated(
        made.name, made.container_id, made.image_digest, made.host, made.pid, made.pid_start_ticks, run, spec
    )
