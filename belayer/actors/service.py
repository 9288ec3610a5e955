"""All actors of one host in one process, until cancelled. Any number of such processes may run, on any number of hosts.

Actors share nothing but the journal, so killing the process at any instant loses nothing: its notices come at once to
another process of its host, or to the next one that is started there.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from belayer.actors.actor import Actor, run_actor
from belayer.actors.checkpointer import Checkpointer
from belayer.actors.detector import Detector
from belayer.actors.names import new_name
from belayer.actors.peers import Peers
from belayer.actors.policy import Policy
from belayer.actors.reaper import Reaper
from belayer.actors.recovery import Recovery
from belayer.actors.sandbox_recovery import SandboxRecovery
from belayer.actors.worker_recovery import WorkerRecovery
from belayer.gpu.protocol import EngineHost
from belayer.journal.store import JournalStore
from belayer.sandbox.limits import LIMITS
from belayer.sandbox.protocol import SandboxHost

if TYPE_CHECKING:
    from belayer.journal.archive import Archive

PATIENCE_S = 20.0
"""How long an actor waits for a step of another's work: the start of an engine, the removal of a sandbox."""
SANDBOX_PATIENCE_S = LIMITS.checkpoint_s + 60.0
"""The same for a capture or a restore: more than it may take, so that a slow one is never cut off and begun again.

Those who do it are on this host, where the death of one is seen at once."""


async def run_actors(
    store: JournalStore,
    sandboxes: SandboxHost,
    engines: EngineHost,
    host_name: str,
    ready: asyncio.Event | None = None,
    *,
    engine_patience_s: float = PATIENCE_S,
    relapse_s: float = 0.0,
    archive: Archive | None = None,
    policy: Policy = "every-boundary",
) -> None:
    """Run detector, checkpointer, recovery and reaper, and the archiver if there is an archive.

    `ready` is set once they have begun.

    `engine_patience_s`: the same as PATIENCE_S for the start of an engine. `relapse_s`: see WorkerRecovery.
    `policy`: which boundaries are captured.
    """
    by = new_name(host_name)
    consumer = by.removeprefix("actors/")
    peers = Peers(host_name, consumer)
    actors: list[Actor] = [
        Detector(store, engines, host_name, by),
        Checkpointer(store, sandboxes, host_name, by, SANDBOX_PATIENCE_S, policy),
        Recovery(
            SandboxRecovery(store, sandboxes, host_name, by, SANDBOX_PATIENCE_S),
            WorkerRecovery(store, engines, host_name, by, patience_s=engine_patience_s, relapse_s=relapse_s),
        ),
        Reaper(store, sandboxes, engines, host_name, by),
    ]
    async with asyncio.TaskGroup() as tasks:
        for actor in actors:
            tasks.create_task(run_actor(store, actor, host_name, consumer, peers), name=actor.name)
        if archive is not None:
            from belayer.actors.archiver import GROUP, Archiver

            archiver = Archiver(store, archive, by, patience_s=PATIENCE_S)
            tasks.create_task(run_actor(store, archiver, GROUP, consumer, peers), name=archiver.name)
        if ready is not None:
            ready.set()
