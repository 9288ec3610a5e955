"""Sentinel failovers that roll acknowledged events back: found, reported, made good; and nobody old gets in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from belayer import ids
from belayer.errors import FencedError, JournalUnavailableError, WrongSequenceError
from belayer.journal.codec import Recorded
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.events import TrajectoryFinished
from belayer.journal.link import NotReadyError
from belayer.journal.route import parse_routes
from belayer.journal.sentinel import SentinelRoute
from belayer.journal.store import JournalStore
from belayer.journal.writer import StreamWriter, take_over
from tests.journal.faults import T, command, generation, opened, paused, stored, written
from tests.journal.topologies import Sentineled, detached, sentineled
from tests.waiting import until


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Sentineled]:
    """A primary, a replica and three sentinels that a test may break."""
    async with sentineled(tmp_path / "s") as made:
        yield made


async def has_streams(server: EmbeddedServer, count: int) -> bool:
    return len(await command(server.url, "KEYS", "*:s:*")) == count


async def test_a_failover_that_rolls_back_acknowledged_events_is_found_and_made_good(made: Sentineled) -> None:
    store, blind = await opened(made.url), await opened(made.url, held_bytes=0)
    writer, other = await written(store), await written(blind, ids.trajectory("u"))
    await until(lambda: has_streams(made.servers[1], 2), what="the replica")
    async with detached(*made.servers):
        for number in range(5):
            await writer.append(generation(number))
        await other.append(generation(7))
    before = await stored_once(made, store, 9)
    assert await writer.append(generation(8)) == 10
    with pytest.raises(WrongSequenceError):
        await other.append(generation(8))
    (loss,) = await blind.losses()
    assert (loss.stream, loss.first_sequence, loss.last_sequence, loss.restored) == (T, 5, 9, True)
    assert (await stored(blind))[:9] == before
    await store.close()
    await blind.close()


async def stored_once(made: Sentineled, store: JournalStore, count: int) -> list[Recorded]:
    """What is stored once so many events are."""
    await made.fail_over(made.servers[1])
    return await until(lambda: so_many(store, count), what="the restored events")


async def so_many(store: JournalStore, count: int) -> list[Recorded] | None:
    events = await stored(store)
    return events if len(events) == count else None


@pytest.mark.parametrize("durability", ["everysec", "replicated"])
async def test_a_paused_writer_and_its_paused_primary_do_not_get_in_after_a_failover(
    made: Sentineled, durability: str
) -> None:
    """The old primary executes the old writer's append when it wakes. Only mode replicated does not acknowledge it.

    Unless the old writer's store noticed the failover first: the append is then before the take-over, and stays.
    """
    old_store = await opened(made.url, durability=durability)
    old = await written(old_store)
    await until(lambda: has_streams(made.servers[1], 1), what="the replica")
    with paused(made.servers[0].pid):
        late = asyncio.create_task(old.append(generation(9)))
        await made.fail_over(made.servers[1])
        new_store = await opened(made.url)
        successor, _ = await take_over(new_store, T, "b")
        await successor.append(generation(10))
    acknowledged = False
    with pytest.raises(FencedError) as caught:
        await late
        acknowledged = True
        while True:
            await old.append(generation(11))
    assert (caught.value.epoch, caught.value.current_epoch) == (1, 2)
    events = await stored(new_store)
    assert [recorded.epoch for recorded in events][-3:] == [1, 2, 2]
    lost = acknowledged and events[-3].event != generation(9)
    assert not (lost and durability == "replicated")
    losses = [(loss.first_sequence, loss.restored) for loss in await new_store.losses()]
    assert losses == ([(5, False)] if lost else [])
    await old_store.close()
    await new_store.close()


async def test_a_replica_that_lags_holds_up_the_acknowledgement_and_nothing_else(made: Sentineled) -> None:
    store = await opened(made.url, durability="replicated", timeout_s=2.0)
    reader = await opened(made.url)
    writer = await written(store)
    with paused(made.servers[1].pid):
        with pytest.raises(JournalUnavailableError, match=r"0 of 1 replicas have it|no reply within"):
            await writer.append(generation(9))
        assert len(await stored(reader)) == 5
    assert await until(lambda: retried(writer), what="the replica") == 5
    assert len(await stored(reader)) == 5
    await store.close()
    await reader.close()


async def retried(writer: StreamWriter) -> int:
    try:
        return await writer.retry()
    except JournalUnavailableError:
        return 0


async def test_the_newest_answer_of_a_majority_is_believed(made: Sentineled) -> None:
    """One sentinel is paused through a failover and still names the old primary when it wakes."""
    route = parse_routes(made.url)
    assert isinstance(route, SentinelRoute)
    assert (await route.primary(5.0)).port == made.servers[0].port
    with paused(made.sentinels[0].pid):
        await made.servers[0].kill()
        await Sentineled(made.servers, made.sentinels[1:]).fail_over(made.servers[1])
        assert (await route.primary(5.0)).port == made.servers[1].port
    assert (await route.primary(5.0)).port == made.servers[1].port


async def test_a_clock_that_jumps_back_changes_no_order(made: Sentineled) -> None:
    """Entry ids are epoch and sequence; notices keep coming after the server's clock was ahead for a while."""
    store = await opened(made.url)
    writer, _ = await take_over(store, T, "a")
    for time_ns in (10**18, 5, 2 * 10**18, 0):
        await writer.append(generation(1), time_ns=time_ns)
    assert [recorded.sequence for recorded in await stored(store)] == [1, 2, 3, 4, 5]
    ahead = str(4102444800000)
    control = "{belayer:default:0}:control"
    await command(made.servers[0].url, "XADD", control, f"{ahead}-0", "s", str(T), "t", "trajectory-started")
    async with store.subscribe("g", "c") as notices:
        notice = await notices.next(5.0)
        assert notice is not None
        await notices.done(notice)
        await writer.append(TrajectoryFinished("done"))
        notice = await notices.next(5.0)
        assert notice is not None and notice.tag == "trajectory-finished"
    await store.close()


async def test_a_store_that_is_opened_in_mid_failover_waits_for_the_primary(made: Sentineled) -> None:
    """The sentinels then name a server that is still, or already, a replica."""
    primary, other = made.servers
    await command(primary.url, "REPLICAOF", "127.0.0.1", str(other.port))
    with pytest.raises(NotReadyError):
        await SentinelRoute(made.url).open("look", 10.0)
    opening = asyncio.create_task(opened(made.url))
    await command(primary.url, "REPLICAOF", "NO", "ONE")
    await (await opening).close()
