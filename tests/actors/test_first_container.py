"""The first container of a trajectory: made once, in nobody's way, and never left behind."""

from __future__ import annotations

import pytest

from belayer import ids
from belayer.actors.reaper import Reaper
from belayer.actors.reports import report_sandbox_failure
from belayer.actors.sandboxes import create_sandbox, incarnation_name, look
from belayer.client import Trajectory
from belayer.errors import FencedError
from belayer.gpu.recorded_host import RecordedEngineHost
from belayer.journal.events import RecoveryStarted, SandboxRemoved, SandboxSpec, StreamArchived
from belayer.journal.memory_store import MemoryStore
from belayer.journal.store import Notice
from belayer.journal.writer import take_over
from belayer.sandbox.protocol import Incarnation
from tests.actors.model import ModelHost

SPEC = SandboxSpec("image")


async def test_whoever_asks_for_it_again_does_not_disturb_a_recovery() -> None:
    store, host = MemoryStore(), ModelHost()
    box = await create_sandbox(store, host, "run", "t", SPEC, "rollout")
    await report_sandbox_failure(store, "t", box.incarnation, "died", "gone", "rollout")
    recovery, _ = await take_over(store, ids.sandbox("t"), "recovery")
    await recovery.append(RecoveryStarted(box.incarnation, "restore", "recovery"))
    assert (await create_sandbox(store, host, "run", "t", SPEC, "rollout")).phase == "recovering"
    await recovery.check_epoch()


class Overtaken(ModelHost):
    """While a container is made, somebody else takes the sandbox over."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self._store = store

    async def create(self, run: str, trajectory: str, incarnation: str, spec: SandboxSpec) -> Incarnation:
        made = await super().create(run, trajectory, incarnation, spec)
        await take_over(self._store, ids.sandbox(trajectory), "another rollout")
        return made


async def test_one_that_cannot_be_journaled_any_more_is_removed() -> None:
    store = MemoryStore()
    host = Overtaken(store)
    with pytest.raises(FencedError):
        await create_sandbox(store, host, "run", "t", SPEC, "rollout")
    assert not host.containers


async def test_one_whose_rollout_died_before_the_journal_knew_it_goes_with_the_trajectory(tmp_path) -> None:
    store, host = MemoryStore(), ModelHost()
    t = await Trajectory.open(store, "t")
    await t.start("run", "task", [1])
    await take_over(store, ids.sandbox("t"), "rollout")
    await host.create("run", "t", incarnation_name("t", 1), SPEC)
    await t.abort("its rollout is gone")
    engines = RecordedEngineHost(tmp_path, tmp_path, owner_pid=1)
    await Reaper(store, host, engines, "host", "reaper").handle(Notice(ids.trajectory("t"), "trajectory-aborted", ""))
    assert not host.containers


async def test_a_late_report_about_what_is_archived_says_nothing() -> None:
    store, host = MemoryStore(), ModelHost()
    box = await create_sandbox(store, host, "run", "t", SPEC, "rollout")
    writer, _ = await take_over(store, ids.sandbox("t"), "reaper")
    await writer.append(SandboxRemoved(box.incarnation, "over"))
    archiver, _ = await take_over(store, ids.sandbox("t"), "archiver")
    await archiver.append(StreamArchived(archiver.sequence - 1, "segment"))
    await store.trim(ids.sandbox("t"), (await store.read(ids.sandbox("t")))[-1])
    before = (await look(store, "t")).sequence
    assert not await report_sandbox_failure(store, "t", box.incarnation, "died", "gone", "detector")
    assert (await look(store, "t")).sequence == before
