"""What every JournalStore promises of notices, checked alike on the reference in memory and on real servers."""

from __future__ import annotations

import asyncio
import time

from belayer import ids
from belayer.journal.events import ActionStarted, FailureDetected, TrajectoryStarted
from belayer.journal.store import JournalStore, Notice
from belayer.journal.writer import take_over
from tests.waiting import DEADLINE_S

STALE_S = 0.4


async def started(store: JournalStore, name: str) -> None:
    writer, _ = await take_over(store, ids.trajectory(name), "a")
    await writer.append(TrajectoryStarted("run", "task", b""))


async def test_notices_come_to_every_group_also_from_before_it(store: JournalStore) -> None:
    await started(store, "a")
    for group in ("g", "h"):
        async with store.subscribe(group, "c") as notices:
            notice = await notices.next(DEADLINE_S)
            assert notice is not None
            assert (notice.stream, notice.tag) == (ids.trajectory("a"), "trajectory-started")
            await notices.done(notice)
            assert await notices.next(0.01) is None


async def test_events_that_nobody_acts_on_have_no_notice(store: JournalStore) -> None:
    writer, _ = await take_over(store, ids.trajectory("t"), "a")
    await writer.append(ActionStarted(1, "true", 1.0, "i"))
    await writer.append(ActionStarted(1, "true", 1.0, "i"), FailureDetected("i", "died", "gone", "me"))
    async with store.subscribe("g", "c") as notices:
        notice = await notices.next(DEADLINE_S)
        assert notice is not None and notice.tag == "failure-detected"
        assert await notices.next(0.01) is None


async def test_each_notice_goes_to_one_consumer_of_a_group(store: JournalStore) -> None:
    for number in range(20):
        await started(store, f"t{number}")
    async with store.subscribe("g", "c1") as first, store.subscribe("g", "c2") as second:
        seen: list[Notice] = []
        for number in range(20):
            notice = await (first if number % 2 else second).next(DEADLINE_S)
            assert notice is not None
            seen.append(notice)
        assert await first.next(0.01) is None
    assert {notice.stream.name for notice in seen} == {f"t{number}" for number in range(20)}


async def test_a_stale_notice_goes_to_another_consumer_before_a_new_one(store: JournalStore) -> None:
    await started(store, "a")
    async with store.subscribe("g", "c1", 0.05) as dead, store.subscribe("g", "c2", 0.05) as alive:
        assert await dead.next(DEADLINE_S) is not None
        notice = await alive.next(DEADLINE_S)
        assert notice is not None and notice.stream == ids.trajectory("a")
        await alive.done(notice)
        assert await alive.next(0.15) is None


async def test_a_renewed_notice_is_not_stale(store: JournalStore) -> None:
    """It may come to another consumer once it was not renewed for so long, which a busy machine may let happen."""
    await started(store, "a")
    async with store.subscribe("g", "c1", STALE_S) as busy, store.subscribe("g", "c2", STALE_S) as other:
        notice = await busy.next(DEADLINE_S)
        assert notice is not None
        begun = renewed = time.monotonic()
        while time.monotonic() < begun + 3 * STALE_S:
            if await other.next(STALE_S / 4) is not None:
                assert time.monotonic() - renewed > 0.9 * STALE_S
            renewed = time.monotonic()
            await busy.renew(notice)
        await busy.done(notice)
        await busy.renew(notice)
        assert await other.next(1.5 * STALE_S) is None


async def test_what_a_dead_consumer_had_comes_to_its_heir_at_once(store: JournalStore) -> None:
    async with (
        store.subscribe("g", "dead", 1000.0) as dead,
        store.subscribe("g", "other", 1000.0) as other,
        store.subscribe("g", "heir", 1000.0) as heir,
    ):
        await started(store, "kept")
        assert await other.next(DEADLINE_S) is not None
        for name in "abc":
            await started(store, name)
        left = {await dead.next(DEADLINE_S) for _ in "abc"}
        assert await heir.holders() == ["dead", "other"]
        waiting = asyncio.create_task(heir.next(DEADLINE_S))
        await asyncio.wait([waiting], timeout=0.05)
        await heir.inherit("dead")
        inherited = {await waiting, await heir.next(DEADLINE_S), await heir.next(DEADLINE_S)}
        assert inherited == left
        await other.inherit("dead")
        assert await heir.holders() == ["heir", "other"]
        for notice in inherited:
            assert notice is not None
            await heir.done(notice)
        assert await heir.holders() == ["other"]
        assert await other.next(0.01) is None


async def test_next_ends_with_the_notice(store: JournalStore) -> None:
    async with store.subscribe("g", "c") as notices:
        waiting = asyncio.create_task(notices.next(DEADLINE_S))
        await started(store, "a")
        assert await waiting is not None
