"""A rollout that opens its trajectory in the middle of a recovery's first step costs the recovery nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from belayer import ids
from belayer.actors.checkpointer import Checkpointer
from belayer.actors.reports import report_sandbox_failure
from belayer.actors.sandbox_recovery import SandboxRecovery
from belayer.actors.sandboxes import create_sandbox, incarnation_of, look
from belayer.client import Trajectory
from belayer.ids import StreamId, StreamKind
from belayer.journal.codec import Entry
from belayer.journal.events import (
    CheckpointDiscarded,
    CheckpointPublished,
    LeftOut,
    RecoveryStarted,
    SandboxRestored,
    SandboxSpec,
    TrajectoryResumed,
)
from belayer.journal.memory_store import MemoryStore
from belayer.journal.store import Notice
from belayer.journal.writer import Reader, take_over
from belayer.projections import trajectory
from belayer.projections.sandbox import SandboxState
from belayer.sandbox.protocol import Action, CheckpointReport, Incarnation
from tests.actors.model import ModelHost
from tests.actors.test_checkpointer import one_action
from tests.waiting import within


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
    await within(recovery.recover("t"))
    prefix = trajectory.fold(await Reader(store, ids.trajectory("t")).catch_up())
    state = await look(store, "t")
    assert not store.armed and state.phase == "live" and state.incarnation != box.incarnation
    assert prefix.phase == "open" and prefix.sandbox_incarnation == state.incarnation


class BrokenHost(ModelHost):
    """Restores of the checkpoints named here end with an error that is nobody's; so does every new beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: list[str] = []

    async def restore(
        self, run: str, trajectory: str, incarnation: str, spec: SandboxSpec, checkpoint: str, action: int
    ) -> Incarnation:
        if checkpoint in self.broken:
            raise TypeError("a checkpoint that is a list")
        return await super().restore(run, trajectory, incarnation, spec, checkpoint, action)

    async def create(self, run: str, trajectory: str, incarnation: str, spec: SandboxSpec) -> Incarnation:
        if "" in self.broken and len(self.containers) > 0:
            raise RecursionError("too deep")
        return await super().create(run, trajectory, incarnation, spec)


@pytest.mark.parametrize(
    ("broken", "phase", "boundary"), [([], "open", 2), ([2], "open", 1), ([1, 2], "open", 0), ([0, 1, 2], "aborted", 2)]
)
async def test_an_error_that_nobody_foresaw_is_not_tried_for_ever(broken: list[int], phase: str, boundary: int) -> None:
    store, host = MemoryStore(), BrokenHost()
    t = await Trajectory.open(store, "t", writer="rollout")
    await t.start("run", "task", [1])
    box = await create_sandbox(store, host, "run", "t", SandboxSpec("image"), "rollout")
    assert box.container is not None
    here, host_name = incarnation_of(box.container), box.container.host
    checkpointer = Checkpointer(store, host, host_name, "actors/x")
    for number in (1, 2):
        await t.begin_generation()
        await t.append_tokens([number], [0.0])
        await t.finish_generation("stop")
        await t.start_action(f"do {number}", 1.0, here.name)
        seen = await (await host.attach(here)).run(Action(number, f"do {number}"))
        await t.commit_action(seen.exit_status, [1], b"", seen.duration_s)
        await checkpointer.handle(Notice(ids.trajectory("t"), "action-committed", ""))
    names = ["", *host.saved]
    host.broken = [names[number] for number in broken]
    await report_sandbox_failure(store, "t", here.name, "died", "gone", "rollout")
    await SandboxRecovery(store, host, host_name, "actors/x").recover("t")  # returns: the notice is done
    prefix = trajectory.fold(await Reader(store, ids.trajectory("t")).catch_up())
    assert (prefix.phase, prefix.boundary.number) == (phase, boundary)
    events = [recorded.event for recorded in await Reader(store, ids.sandbox("t")).catch_up()]
    discarded = [event for event in events if isinstance(event, CheckpointDiscarded)]
    assert [event.checkpoint for event in discarded] == [names[number] for number in reversed(broken) if number]
    assert all("TypeError" in event.reason for event in discarded)
    assert len(host.containers) == (0 if phase == "aborted" else 1)


LACKS = (LeftOut(12, "postgres", "it has [io_uring] open, which CRIU cannot dump"),)


class FilesAlone(ModelHost):
    """A host that can capture no processes."""

    async def checkpoint(
        self, incarnation: Incarnation, checkpoint: str, action: int, since: str = "", hold: bool = False
    ) -> CheckpointReport:
        return replace(await super().checkpoint(incarnation, checkpoint, action, since, hold), left_out=LACKS)


async def files_alone(store: MemoryStore, host: ModelHost) -> SandboxState:
    """A sandbox of which there is a checkpoint of boundary 1, of the files alone."""
    await one_action(store, host)
    notice = Notice(ids.trajectory("t"), "action-committed", "")
    await Checkpointer(store, host, "host", "checkpointer").handle(notice)
    return await look(store, "t")


async def told(store: MemoryStore) -> list[tuple[LeftOut, ...]]:
    """What the journal's events say is left out, in the order of capture, restore and resumption."""
    history = [*await Reader(store, ids.sandbox("t")).catch_up(), *await Reader(store, ids.trajectory("t")).catch_up()]
    kinds = (CheckpointPublished, SandboxRestored, TrajectoryResumed)
    return [recorded.event.left_out for recorded in history if isinstance(recorded.event, kinds)]


async def test_what_is_not_brought_back_is_in_every_event_on_the_way() -> None:
    store, host = MemoryStore(), FilesAlone()
    box = await files_alone(store, host)
    await report_sandbox_failure(store, "t", box.incarnation, "died", "gone", "rollout")
    await SandboxRecovery(store, host, "host", "actors/x").recover("t")
    assert await told(store) == [LACKS] * 3
    t = await Trajectory.open(store, "t")
    assert (t.state.boundary.number, t.state.left_out) == (1, LACKS)
    # Once more, from the initial state: that lacks nothing.
    (name,) = box.published
    await host.remove_checkpoint(name)
    await report_sandbox_failure(store, "t", (await look(store, "t")).incarnation, "died", "gone", "rollout")
    await SandboxRecovery(store, host, "host", "actors/x").recover("t")
    assert await told(store) == [LACKS, LACKS, (), LACKS, ()]
    assert (await Trajectory.open(store, "t")).state.left_out == ()


async def test_a_recovery_that_finishes_anothers_says_it_too() -> None:
    store, host = MemoryStore(), FilesAlone()
    box = await files_alone(store, host)
    await report_sandbox_failure(store, "t", box.incarnation, "died", "gone", "rollout")
    writer, _ = await take_over(store, ids.sandbox("t"), "dies after its restore")
    await writer.append(RecoveryStarted(box.incarnation, "restore", "dead"))
    rollout, _ = await take_over(store, ids.trajectory("t"), "dead")
    await rollout.append(RecoveryStarted(box.incarnation, "restore", "dead"))
    (made,) = box.published.values()
    at = made.boundary, made.boundary_sequence
    here = await host.restore("run", "t", "box-2", SandboxSpec("image"), made.checkpoint, 1)
    await writer.append(
        SandboxRestored(made.checkpoint, *at, here.name, here.container_id, "image", "host", here.pid, 1, 0.1, LACKS)
    )
    await SandboxRecovery(store, host, "host", "actors/x").recover("t")
    assert await told(store) == [LACKS] * 3


async def test_a_container_that_dies_before_its_trajectory_has_begun_is_made_again() -> None:
    store, host = MemoryStore(), ModelHost()
    box = await create_sandbox(store, host, "run", "t", SandboxSpec("image"), "rollout")
    await report_sandbox_failure(store, "t", box.incarnation, "died", "gone", "rollout")
    await SandboxRecovery(store, host, "host", "actors/x").recover("t")
    await one_action(store, host)
    state = await look(store, "t")
    assert (
        state.phase == "live" and list(host.containers) == [state.incarnation] and state.incarnation != box.incarnation
    )
    prefix = trajectory.fold(await Reader(store, ids.trajectory("t")).catch_up())
    assert (prefix.phase, prefix.boundary.number) == ("open", 1)
