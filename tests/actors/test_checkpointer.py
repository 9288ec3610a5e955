"""Several checkpointers at one sandbox: a capture under way is waited for, one that nobody can publish is not."""

import asyncio
import time
from dataclasses import replace

import pytest

from belayer import ids
from belayer.actors.checkpointer import HOLD_AFTER, Checkpointer
from belayer.actors.sandboxes import create_sandbox, incarnation_of, look
from belayer.client import Trajectory
from belayer.errors import CheckpointRefusedError, WrongSequenceError
from belayer.journal.events import (
    CheckpointDiscarded,
    CheckpointPublished,
    CheckpointStarted,
    FailureDetected,
    RecoveryStarted,
    SandboxRestored,
    SandboxSpec,
)
from belayer.journal.memory_store import MemoryStore
from belayer.journal.store import Notice
from belayer.journal.writer import Reader, take_over
from belayer.sandbox.protocol import Action, CheckpointReport, Incarnation
from tests.actors.model import ModelHost
from tests.waiting import within

NAME = "t"
NOTICE = Notice(ids.trajectory(NAME), "action-committed", "")


class SlowHost(ModelHost):
    """A host whose captures end when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()

    async def checkpoint(
        self, incarnation: Incarnation, checkpoint: str, action: int, since: str = "", hold: bool = False
    ) -> CheckpointReport:
        self.begun.set()
        await self.may_end.wait()
        return await super().checkpoint(incarnation, checkpoint, action, since, hold)


async def one_action(store: MemoryStore, host: ModelHost, run: str = "run") -> None:
    t = await Trajectory.open(store, NAME)
    await t.start(run, "task", [1])
    box = await create_sandbox(store, host, run, NAME, SandboxSpec("image"), "rollout")
    assert box.container is not None
    await t.begin_generation()
    await t.append_tokens([7], [0.0])
    await t.finish_generation("stop")
    number = await t.start_action("do it", 1.0, box.incarnation)
    seen = await (await host.attach(incarnation_of(box.container))).run(Action(number, "do it"))
    await t.commit_action(seen.exit_status, [1], b"", seen.duration_s)


async def captures(store: MemoryStore) -> list[type]:
    history = await Reader(store, ids.sandbox(NAME)).catch_up()
    kinds = (CheckpointStarted, CheckpointPublished, CheckpointDiscarded)
    return [type(recorded.event) for recorded in history if isinstance(recorded.event, kinds)]


async def test_a_capture_under_way_is_waited_for() -> None:
    store, host = MemoryStore(), SlowHost()
    await one_action(store, host)
    first = asyncio.create_task(Checkpointer(store, host, "host", "one", 1000.0).handle(NOTICE))
    await within(host.begun.wait())
    others = [
        asyncio.create_task(Checkpointer(store, host, "host", by, 1000.0).handle(NOTICE)) for by in ("two", "three")
    ]
    host.may_end.set()
    await within(asyncio.gather(first, *others))
    assert await captures(store) == [CheckpointStarted, CheckpointPublished]


@pytest.mark.parametrize("overtaken", [True, False])
async def test_a_capture_that_cannot_be_published_any_more_is_discarded(overtaken: bool) -> None:
    store, host = MemoryStore(), SlowHost()
    await one_action(store, host)
    dead = asyncio.create_task(Checkpointer(store, host, "host", "dead").handle(NOTICE))
    await within(host.begun.wait())
    dead.cancel()
    if overtaken:
        await take_over(store, ids.sandbox(NAME), "somebody")
    host.may_end.set()
    patience_s = 1000.0 if overtaken else 0.05
    await within(Checkpointer(store, host, "host", "next", patience_s).handle(NOTICE))
    assert await captures(store) == [CheckpointStarted, CheckpointDiscarded, CheckpointStarted, CheckpointPublished]


async def test_the_event_says_what_was_stored_and_what_is_not_in_it() -> None:
    class Mounted(ModelHost):
        async def checkpoint(
            self, incarnation: Incarnation, checkpoint: str, action: int, since: str = "", hold: bool = False
        ) -> CheckpointReport:
            report = await super().checkpoint(incarnation, checkpoint, action, since, hold)
            return replace(report, size_bytes=100, stored_bytes=40, not_captured=("/data",))

    store, host = MemoryStore(), Mounted()
    await one_action(store, host)
    await Checkpointer(store, host, "host", "one").handle(NOTICE)
    (published,) = (await look(store, NAME)).published.values()
    assert (published.size_bytes, published.stored_bytes, published.not_captured) == (100, 40, ("/data",))


async def test_a_stream_that_has_moved_on_is_not_taken() -> None:
    store, host = MemoryStore(), ModelHost()
    await one_action(store, host)
    before = await look(store, NAME)
    with pytest.raises(WrongSequenceError):
        await take_over(store, ids.sandbox(NAME), "late", only_at=before.sequence - 1)
    assert (await look(store, NAME)).epoch == before.epoch
    await take_over(store, ids.sandbox(NAME), "in time", only_at=before.sequence)
    assert (await look(store, NAME)).epoch == before.epoch + 1


async def test_after_a_time_out_the_adaptive_policy_waits() -> None:
    store, host = MemoryStore(), ModelHost()
    await one_action(store, host)
    box = await look(store, NAME)
    writer, _ = await take_over(store, ids.sandbox(NAME), "too slow")
    long_ago_ns = time.time_ns() - 100 * 10**9
    await writer.append(CheckpointStarted("t-b1-e2", box.incarnation, 1, 9), time_ns=long_ago_ns)
    just_now_ns = time.time_ns() + 100 * 10**9  # and still so on a machine that takes its time
    await writer.append(CheckpointDiscarded("t-b1-e2", "given up"), time_ns=just_now_ns)
    adaptive = Checkpointer(store, host, "host", "adaptive", policy="adaptive")
    await adaptive.handle(NOTICE)
    assert not host.saved
    await Checkpointer(store, host, "host", "every").handle(NOTICE)
    assert len(host.saved) == 1


async def test_the_adaptive_policy_captures_when_the_next_generation_is_likely_to_last_longer() -> None:
    store, host = MemoryStore(), ModelHost()
    await one_action(store, host)
    adaptive = Checkpointer(store, host, "host", "adaptive", policy="adaptive")
    await adaptive.handle(NOTICE)
    assert not host.saved, "the first guess at a capture's duration is longer than what could be lost"
    state = await look(store, NAME)
    writer, _ = await take_over(store, ids.sandbox(NAME), "somebody")
    at = state.incarnation, 0, 0
    await writer.append(CheckpointStarted("t-b0", *at), CheckpointPublished("t-b0", *at, 10, 0.0, 0.0))
    await adaptive.handle(NOTICE)
    assert len(host.saved) == 1


class FastActionsHost(ModelHost):
    """A host where the next action is always faster than a capture that does not hold it up."""

    async def checkpoint(
        self, incarnation: Incarnation, checkpoint: str, action: int, since: str = "", hold: bool = False
    ) -> CheckpointReport:
        if not hold:
            raise CheckpointRefusedError(incarnation.name, "it has moved on")
        return await super().checkpoint(incarnation, checkpoint, action, since, hold)


async def test_after_some_captures_in_vain_the_next_action_has_to_wait() -> None:
    store, host = MemoryStore(), FastActionsHost()
    await one_action(store, host)
    checkpointer = Checkpointer(store, host, "host", "one")
    for _ in range(HOLD_AFTER + 1):
        await checkpointer.handle(NOTICE)
    assert await captures(store) == [CheckpointStarted, CheckpointDiscarded] * HOLD_AFTER + [
        CheckpointStarted,
        CheckpointPublished,
    ]
    assert (await look(store, NAME)).refused == 0


async def test_a_recovery_is_not_fenced_off_for_a_dead_checkpointers_sake() -> None:
    store, host = MemoryStore(), ModelHost()
    await one_action(store, host)
    box = await look(store, NAME)
    dead, _ = await take_over(store, ids.sandbox(NAME), "dead")
    await dead.append(CheckpointStarted("t-b1-e2", box.incarnation, 1, 9))
    recovery, _ = await take_over(store, ids.sandbox(NAME), "recovery")
    await recovery.append(
        FailureDetected(box.incarnation, "died", "", "detector"), RecoveryStarted(box.incarnation, "", "recovery")
    )
    checkpointer = Checkpointer(store, host, "host", "one")
    await checkpointer.handle(NOTICE)
    assert (await look(store, NAME)).epoch == recovery.epoch
    made = await host.create("run", NAME, f"belayer-{NAME}-e{recovery.epoch}", SandboxSpec("image"))
    await recovery.append(SandboxRestored("", 0, 0, made.name, made.container_id, "image", "host", 1, 1, 0.1))
    await checkpointer.handle(NOTICE)
    assert (await captures(store))[:2] == [CheckpointStarted, CheckpointDiscarded], "at the next notice it is discarded"


class BrokenHost(ModelHost):
    """A host in which captures end with an error that is nobody's, and leave something behind."""

    async def checkpoint(
        self, incarnation: Incarnation, checkpoint: str, action: int, since: str = "", hold: bool = False
    ) -> CheckpointReport:
        await super().checkpoint(incarnation, checkpoint, action, since, hold)
        raise TypeError("\udcff is nothing")


async def test_an_error_that_nobody_foresaw_ends_the_capture_and_is_not_tried_again() -> None:
    store, host = MemoryStore(), BrokenHost()
    await one_action(store, host)
    await Checkpointer(store, host, "host", "one").handle(NOTICE)  # returns: the notice is done
    assert await captures(store) == [CheckpointStarted, CheckpointDiscarded]
    assert host.saved == {}
    discarded = (await Reader(store, ids.sandbox(NAME)).catch_up())[-1].event
    assert isinstance(discarded, CheckpointDiscarded) and "TypeError" in discarded.reason
