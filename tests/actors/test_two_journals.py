"""Two journals on one machine, each with a trajectory of the same name: neither touches what is the other's."""

from __future__ import annotations

from belayer import ids
from belayer.actors.checkpointer import Checkpointer
from belayer.actors.reaper import Reaper
from belayer.actors.reports import report_sandbox_failure
from belayer.actors.sandbox_recovery import SandboxRecovery
from belayer.actors.sandboxes import checkpoint_name, incarnation_epoch, incarnation_name, is_checkpoint_of, look
from belayer.client import Trajectory
from belayer.gpu.recorded_host import RecordedEngineHost
from belayer.journal.memory_store import MemoryStore
from belayer.journal.store import Notice
from tests.actors.model import ModelHost
from tests.actors.test_checkpointer import NOTICE, one_action


async def test_containers_and_checkpoints_of_one_name_are_kept_apart(tmp_path) -> None:
    host, first, second = ModelHost(), MemoryStore(), MemoryStore()
    for store, run in ((first, "day-run"), (second, "night-run")):
        await one_action(store, host, run)
        await Checkpointer(store, host, "host", "checkpointer").handle(NOTICE)
    ours, theirs = await look(first, "t"), await look(second, "t")
    assert len(host.containers) == len(host.saved) == 2
    await report_sandbox_failure(first, "t", ours.incarnation, "died", "gone", "rollout")
    await SandboxRecovery(first, host, "host", "actors/x").recover("t")
    reaper = Reaper(first, host, RecordedEngineHost(tmp_path, tmp_path, owner_pid=1), "host", "reaper")
    await reaper.handle(Notice(ids.sandbox("t"), "sandbox-restored", ""))
    assert set(host.containers) == {(await look(first, "t")).incarnation, theirs.incarnation}
    await (await Trajectory.open(first, "t")).abort("enough")
    await reaper.handle(Notice(ids.trajectory("t"), "trajectory-aborted", ""))
    assert list(host.containers) == [theirs.incarnation] and list(host.saved) == list(theirs.published)


def test_the_longest_name_has_room_for_those_made_of_it() -> None:
    longest = "t" * 128
    assert ids.trajectory(longest)
    container, checkpoint = incarnation_name(longest, 10**9, 99), checkpoint_name(longest, 10**6, 10**9)
    assert ids.checked_made_name(container) and ids.checked_made_name(checkpoint)
    assert incarnation_epoch(longest, container) == 10**9 and is_checkpoint_of(longest, checkpoint)
    assert incarnation_epoch("t", "belayer-t-e7") == incarnation_epoch("t", "belayer-t-e7-2") == 7, (
        "an earlier version's"
    )
    assert is_checkpoint_of("t", "t-b1-e2") and not is_checkpoint_of("t", "t-b1-e2-b3-e4-0123abcd")
