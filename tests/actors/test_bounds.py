"""What fails each time is not tried for ever, what is slow is not begun anew, nobody stands in another one's way."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from redis.asyncio import Redis

from belayer import ids
from belayer.actors import service
from belayer.actors.actor import LONGEST_REST_S, rest_s, run_actor
from belayer.actors.checkpointer import ABANDONED, Checkpointer
from belayer.actors.recovery import Recovery
from belayer.actors.reports import report_sandbox_failure
from belayer.actors.sandbox_recovery import RESTORE_DEATHS, SandboxRecovery
from belayer.actors.sandboxes import look
from belayer.actors.worker_recovery import WorkerRecovery
from belayer.client import Trajectory
from belayer.errors import HostUnfitError, JournalUnavailableError
from belayer.ids import StreamId
from belayer.journal.codec import Entry
from belayer.journal.connect import open_store
from belayer.journal.events import (
    CheckpointDiscarded,
    CheckpointPublished,
    CheckpointStarted,
    FailureDetected,
    SandboxSpec,
    TrajectoryStarted,
)
from belayer.journal.memory_store import MemoryStore
from belayer.journal.store import Notice
from belayer.journal.writer import Reader, take_over
from belayer.projections import trajectory
from belayer.sandbox.limits import LIMITS
from belayer.sandbox.protocol import CheckpointReport, Incarnation
from tests.actors.model import CrashError, ModelHost
from tests.actors.test_checkpointer import SlowHost, captures, one_action
from tests.waiting import within

NOTICE = Notice(ids.trajectory("t"), "action-committed", "")


class Poisonous(ModelHost):
    """A host on which each capture ends the process that does it."""

    deadly = True

    async def checkpoint(
        self, incarnation: Incarnation, checkpoint: str, action: int, since: str = "", hold: bool = False
    ) -> CheckpointReport:
        if self.deadly:
            raise CrashError
        return await super().checkpoint(incarnation, checkpoint, action, since, hold)


async def test_a_boundary_whose_captures_end_their_process_is_given_up() -> None:
    store, host = MemoryStore(), Poisonous()
    await one_action(store, host)
    for number in range(2 * ABANDONED):  # its notice comes to another one each time
        try:
            await Checkpointer(store, host, "host", f"actors/elsewhere-{number}-ab").handle(NOTICE)
        except CrashError:
            continue
    assert await captures(store) == [CheckpointStarted, CheckpointDiscarded] * ABANDONED
    (*_, last) = [recorded.event for recorded in await Reader(store, ids.sandbox("t")).catch_up()]
    assert isinstance(last, CheckpointDiscarded) and "boundary 1 is not captured" in last.reason
    # The next boundary is.
    host.deadly = False
    t = await Trajectory.open(store, "t")
    await t.begin_generation()
    await t.finish_generation("stop")
    box = (await look(store, "t")).container
    assert box is not None
    await t.start_action("look", 1.0, box.incarnation)
    host.containers[box.incarnation].last = 2
    await t.commit_action(0, [1], b"", 0.1)
    await Checkpointer(store, host, "host", "actors/elsewhere-99-ab").handle(NOTICE)
    assert (await captures(store))[-1] is CheckpointPublished


async def test_a_slow_capture_is_left_to_whoever_does_it() -> None:
    """Its process sees that another boundary has come, and looks again when it is done; nobody begins anew."""
    assert LIMITS.checkpoint_s < service.SANDBOX_PATIENCE_S
    store, host = MemoryStore(), SlowHost()
    await one_action(store, host)
    checkpointer = Checkpointer(store, host, "host", "one", patience_s=0.0)
    first = asyncio.create_task(checkpointer.handle(NOTICE))
    await within(host.begun.wait())
    await within(checkpointer.handle(NOTICE))  # takes no slot until the first is done
    host.may_end.set()
    await within(first)
    assert await captures(store) == [CheckpointStarted, CheckpointPublished]


async def test_captures_on_another_host_are_not_waited_for() -> None:
    store, host = MemoryStore(), SlowHost()
    await one_action(store, host)
    there = asyncio.create_task(Checkpointer(store, host, "host", "one", 1000.0).handle(NOTICE))
    await within(host.begun.wait())
    await within(Checkpointer(store, host, "elsewhere", "two", 1000.0).handle(NOTICE))
    host.may_end.set()
    await within(there)


class DeadlyRestores(ModelHost):
    """Restores of these states end the process that does them; '' is the initial one, once a container has died."""

    def __init__(self) -> None:
        super().__init__()
        self.deadly: set[str] = set()

    async def restore(
        self, run: str, trajectory: str, incarnation: str, spec: SandboxSpec, checkpoint: str, action: int
    ) -> Incarnation:
        if checkpoint in self.deadly:
            raise CrashError
        return await super().restore(run, trajectory, incarnation, spec, checkpoint, action)

    async def create(self, run: str, trajectory: str, incarnation: str, spec: SandboxSpec) -> Incarnation:
        if "" in self.deadly:
            raise CrashError
        return await super().create(run, trajectory, incarnation, spec)


@pytest.mark.parametrize(("initial_too", "phase"), [(False, "open"), (True, "aborted")])
async def test_a_restore_that_ends_its_process_each_time_is_not_tried_for_ever(initial_too: bool, phase: str) -> None:
    store, host = MemoryStore(), DeadlyRestores()
    await one_action(store, host)
    await Checkpointer(store, host, "host", "one").handle(NOTICE)
    box = await look(store, "t")
    host.deadly = {*box.published, *([""] if initial_too else [])}
    await report_sandbox_failure(store, "t", box.incarnation, "died", "gone", "rollout")
    deaths = 0
    for pid in range(9_000_001, 9_000_001 + 4 * RESTORE_DEATHS):  # no process has these ids
        try:
            await SandboxRecovery(store, host, "host", f"actors/host-{pid}-ab", 1000.0).recover("t")
        except CrashError:
            deaths += 1
    assert deaths == (2 * RESTORE_DEATHS + 1 if initial_too else RESTORE_DEATHS)
    prefix = trajectory.fold(await Reader(store, ids.trajectory("t")).catch_up())
    assert prefix.phase == phase and prefix.boundary.number == (1 if initial_too else 0)
    assert f"{RESTORE_DEATHS} processes have died" in (prefix.reason if initial_too else (await why_discarded(store)))


async def why_discarded(store: MemoryStore) -> str:
    history = [recorded.event for recorded in await Reader(store, ids.sandbox("t")).catch_up()]
    (event,) = [event for event in history if isinstance(event, CheckpointDiscarded)]
    return event.reason


class Unfit(ModelHost):
    """A host whose Docker is down for the first so many restores."""

    down = 7

    async def restore(
        self, run: str, trajectory: str, incarnation: str, spec: SandboxSpec, checkpoint: str, action: int
    ) -> Incarnation:
        self.down -= 1
        if self.down >= 0:
            raise HostUnfitError("Docker", "it does not answer", "start it")
        return await super().restore(run, trajectory, incarnation, spec, checkpoint, action)


async def test_a_daemon_that_is_down_costs_no_checkpoint() -> None:
    store, host = MemoryStore(), Unfit()
    await one_action(store, host)
    await Checkpointer(store, host, "host", "one").handle(NOTICE)
    box = await look(store, "t")
    await report_sandbox_failure(store, "t", box.incarnation, "died", "gone", "rollout")
    recovery = SandboxRecovery(store, host, "host", "actors/x", patience_s=1000.0)
    for _ in range(Unfit.down):
        with pytest.raises(HostUnfitError):
            await within(recovery.recover("t"))  # what we have left for later is not waited for
    await recovery.recover("t")
    state = await look(store, "t")
    assert state.phase == "live" and list(state.published) == list(box.published)
    # Not for ever.
    host.down = 1
    await report_sandbox_failure(store, "t", state.incarnation, "died", "gone", "rollout")
    await SandboxRecovery(store, host, "host", "actors/x", unfit_s=0.0).recover("t")
    assert "Docker: it does not answer" in await why_discarded(store) and (await look(store, "t")).phase == "live"


class Failing:
    """An actor that cannot do what it should for the first so many tries."""

    name = "failing"
    tags = frozenset({"trajectory-started"})
    concurrency = 1
    stale_after_s = 0.01

    def __init__(self, failures: int) -> None:
        self.left = failures
        self.done = asyncio.Event()

    async def handle(self, notice: Notice) -> None:
        if self.left:
            self.left -= 1
            raise HostUnfitError("Docker", "it does not answer", "start it")
        self.done.set()


async def test_what_fails_is_tried_again_after_longer_and_longer_rests() -> None:
    assert [rest_s(1.0, before) for before in (0, 1, 2, 3, 1000)] == [0.0, 1.0, 3.0, 7.0, LONGEST_REST_S]
    store, actor = MemoryStore(), Failing(6)
    running = asyncio.create_task(run_actor(store, actor, "host", "host-1-ab"))
    writer, _ = await take_over(store, ids.trajectory("t"), "a")
    await writer.append(TrajectoryStarted("run", "task", b""))
    await within(actor.done.wait())
    running.cancel()
    await asyncio.wait([running])


async def test_engines_that_are_waited_for_do_not_keep_sandboxes_waiting() -> None:
    """Eight mains that drain, each for minutes, and a sandbox that fails meanwhile."""
    store, drained = MemoryStore(), asyncio.Event()
    recovered, waiting = asyncio.Event(), asyncio.Semaphore(0)

    class Sandboxes:
        async def recover(self, name: str) -> None:
            recovered.set()

    class Workers:
        async def recover(self, name: str) -> None:
            waiting.release()
            await drained.wait()

    actor = Recovery(cast(SandboxRecovery, Sandboxes()), cast(WorkerRecovery, Workers()))
    running = asyncio.create_task(run_actor(store, actor, "host", "host-1-ab"))
    for number in range(16):
        writer, _ = await take_over(store, ids.worker(f"w{number}"), "a")
        await writer.append(FailureDetected("x", "died", "", "a"))
    for _ in range(16):
        await within(waiting.acquire())
    writer, _ = await take_over(store, ids.sandbox("t"), "a")
    await writer.append(FailureDetected("x", "died", "", "a"))
    await within(recovered.wait())
    running.cancel()
    await asyncio.wait([running])


class Uncertain(MemoryStore):
    """Does not answer when a checkpoint is to be published for the first time."""

    lost = 1

    async def append(self, stream: StreamId, entry: Entry, notice_tag: str | None = None) -> None:
        if notice_tag == "checkpoint-published" and self.lost:
            self.lost -= 1
            raise JournalUnavailableError("here", 0.0, "it is being restarted")
        await super().append(stream, entry, notice_tag)


async def test_a_capture_that_we_have_left_open_is_not_waited_for() -> None:
    store, host = Uncertain(), ModelHost()
    await one_action(store, host)
    checkpointer = Checkpointer(store, host, "host", "one", patience_s=1000.0)
    with pytest.raises(JournalUnavailableError):
        await checkpointer.handle(NOTICE)
    await asyncio.wait_for(checkpointer.handle(NOTICE), 10)
    assert await captures(store) == [CheckpointStarted, CheckpointDiscarded, CheckpointStarted, CheckpointPublished]
    assert list(host.saved) == list((await look(store, "t")).published)


async def test_a_notice_that_cannot_be_read_ends_no_actor(redis_url: str, namespace: str) -> None:
    """A newer version in the same group may have written it, and can read it."""
    store = await open_store(redis_url, namespace=namespace)
    client = Redis.from_url(redis_url)
    actor = Failing(0)
    actor.stale_after_s = 0.2
    running = asyncio.create_task(run_actor(store, actor, "host", "host-1-ab"))
    try:
        await client.xadd(f"{{belayer:{namespace}:0}}:control", {"x": "y"})
        writer, _ = await take_over(store, ids.trajectory("t"), "a")
        await writer.append(TrajectoryStarted("run", "task", b""))
        await asyncio.wait_for(actor.done.wait(), 30)
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.wait([running])
        await client.aclose()
        await store.close()
