"""A rollout that opens its trajectory in the middle of a recovery's first step costs the recovery nothing."""

from __future__ import annotations

import asyncio

from belayer import ids
from belayer.actors.reports import report_sandbox_failure
from belayer.actors.sandbox_recovery import SandboxRecovery
from belayer.actors.sandboxes import create_sandbox, look
from belayer.client import Trajectory
from belayer.ids import StreamId, StreamKind
from belayer.journal.codec import Entry
from belayer.journal.events import SandboxSpec
from belayer.journal.memory_store import MemoryStore
from belayer.journal.writer import Reader, take_over
from belayer.projections import trajectory
from tests.actors.model import ModelHost


class Overtaken(MemoryStore):
    """Once armed, somebody else takes a trajectory just before the next append to it."""

    armed = False

    async def append(self, stream: StreamId, entry: Entry, notice_tag: str | None = None) -> None:
        if self.armed and stream.kind is StreamKind.TRAJECTORY:
            self.armed = False
            await take_over(self, stream, "rollout")
        await super().append(stream, entry, notice_tag)


async def test_a_rollout_that_comes_between_is_shut_out_again_at_once() -> None:
    store, host = Overtaken(), ModelHost()
    t = await Trajectory.open(store, "t")
    await t.start("run", "task", [1])
    box = await create_sandbox(store, host, "run", "t", SandboxSpec("image"), "rollout")
    assert box.container is not None
    await report_sandbox_failure(store, "t", box.incarnation, "died", "gone", "rollout")
    store.armed = True
    recovery = SandboxRecovery(store, host, box.container.host, "actors/x", patience_s=1000.0)
    await asyncio.wait_for(recovery.recover("t"), 10.0)
    prefix = trajectory.fold(await Reader(store, ids.trajectory("t")).catch_up())
    state = await look(store, "t")
    assert not store.armed and state.phase == "live" and state.incarnation != box.incarnation
    assert prefix.phase == "open" and prefix.sandbox_incarnation == state.incarnation
