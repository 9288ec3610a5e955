"""A cluster whose slots move and whose primaries die in mid-append: nothing acknowledged is lost or doubled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.crc import key_slot

from belayer import ids
from belayer.errors import FencedError, WrongSequenceError
from belayer.ids import StreamId
from belayer.journal.events import GenerationStarted, TrajectoryFinished
from belayer.journal.redis_store import RedisStore
from belayer.journal.writer import StreamWriter, take_over
from tests.journal.faults import T, command, generation, opened, paused, stored, written
from tests.journal.topologies import Cluster, ClusterNode, SlotMove, cluster, detached
from tests.waiting import DEADLINE_S, until


@pytest.fixture
async def replicated(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster that a test may break: three primaries with a replica each. It fails over when it is told to.

    By itself it would do so also when the machine is busy and a node is late.
    """
    settings = {"repl-diskless-sync-delay": "0", "cluster-node-timeout": "600000"}
    async with cluster(tmp_path / "c", replicas_each=1, settings=settings) as made:
        yield made


async def move_of(made: Cluster, namespace: str, shard: int = 0) -> SlotMove:
    """The move of the shard's slot to the next node."""
    slot = key_slot(f"{{belayer:{namespace}:{shard}}}".encode())
    source = await made.owner(slot)
    target = made.primaries[(made.primaries.index(source) + 1) % len(made.primaries)]
    return SlotMove(made, slot, source, target)


# --- slots that move --------------------------------------------------------------------------------------------------


async def test_half_a_slot_is_written_and_read_on_both_sides(shared_cluster: Cluster, namespace: str) -> None:
    store = await opened(shared_cluster.url, namespace=namespace, shards=1)
    moved, stays = await written(store, T), await written(store, ids.trajectory("u"))
    move = await move_of(shared_cluster, namespace)
    await move.begin()
    await move.move(f"{{belayer:{namespace}:0}}:s:{T}")
    assert await asyncio.gather(moved.append(generation(7)), stays.append(generation(7))) == [5, 5]
    assert await moved.append(generation(8)) == 6
    assert len(await stored(store, T)) == 6 and len(await stored(store, stays.stream)) == 5
    growing = asyncio.create_task(store.wait(T, 6, DEADLINE_S))
    assert await moved.append(generation(9)) == 7
    assert await growing
    rival = StreamWriter(store, T, 1, 3, bytes(16))
    with pytest.raises(WrongSequenceError):
        await rival.append(generation(9))
    noticed = asyncio.create_task(moved.append(TrajectoryFinished("done")))
    successor = asyncio.create_task(take_over(store, ids.trajectory("new"), "b"))
    await asyncio.wait([noticed, successor], timeout=0.1)
    assert not noticed.done()
    await move.finish()
    assert await noticed == 8
    assert (await successor)[0].epoch == 1
    assert len(await stored(store, T)) == 8
    assert len(await store.streams()) == 3
    async with store.subscribe("g", "c") as notices:
        notice = await notices.next(DEADLINE_S)
        assert notice is not None and notice.stream == T
    await store.close()


async def test_slots_that_move_under_load_lose_and_double_nothing(shared_cluster: Cluster, namespace: str) -> None:
    stores = [await opened(shared_cluster.url, namespace=namespace, shards=4) for _ in range(2)]
    streams = [ids.trajectory(f"t{number}") for number in range(24)]
    acknowledged: dict[StreamId, list[int]] = {stream: [] for stream in streams}
    appends, stop = 0, asyncio.Event()

    async def work(store: RedisStore, stream: StreamId) -> None:
        nonlocal appends
        writer, _ = await take_over(store, stream, "w")
        while not stop.is_set():
            appends += 1
            number = appends
            try:
                noticed = [TrajectoryFinished("x")] if number % 20 == 0 else []
                await writer.append(generation(number), *noticed)
                acknowledged[stream].append(number)
            except FencedError:
                writer, _ = await take_over(store, stream, "w")
            if number % 200 == 0:
                writer, _ = await take_over(store, stream, "w")

    async with asyncio.TaskGroup() as tasks:
        for number, stream in enumerate(streams):
            tasks.create_task(work(stores[number % 2], stream))
        for stream in streams[::8]:
            tasks.create_task(work(stores[0], stream))
        for shard in (0, 1, 2, 3, 0, 1):
            before = appends
            await until(lambda before=before: appends > before + 100, what="progress")
            move = await move_of(shared_cluster, namespace, shard)
            await move.begin()
            await move.finish()
        before = appends
        await until(lambda before=before: appends > before + 200, what="progress after the moves")
        stop.set()
    for stream in streams:
        found = [r.event.generation for r in await stored(stores[1], stream) if isinstance(r.event, GenerationStarted)]
        assert set(acknowledged[stream]) <= set(found)
        assert len(set(found)) == len(found)
    for store in stores:
        assert await store.losses() == []
        await store.close()


async def test_a_subscription_goes_on_while_its_control_stream_moves(shared_cluster: Cluster, namespace: str) -> None:
    store = await opened(shared_cluster.url, namespace=namespace, shards=2)
    async with store.subscribe("g", "c") as notices:
        waiting = asyncio.create_task(notices.next(DEADLINE_S))
        for shard in range(2):
            move = await move_of(shared_cluster, namespace, shard)
            await move.begin()
            await move.finish()
        writer = await written(store)
        await writer.append(TrajectoryFinished("done"))
        notice = await waiting
        assert notice is not None and notice.stream == T
        await notices.done(notice)
        assert await notices.next(0.05) is None
    await store.close()


# --- primaries that die -----------------------------------------------------------------------------------------------


async def primary_and_replica(made: Cluster, stream: StreamId = T) -> tuple[ClusterNode, ClusterNode]:
    """The nodes that have the default namespace's only shard."""
    primary = await made.owner(key_slot(b"{belayer:default:0}"))
    return primary, made.replicas[made.primaries.index(primary)]


async def test_a_failover_that_rolls_back_acknowledged_events_is_found_and_made_good(replicated: Cluster) -> None:
    store = await opened(replicated.url, shards=1)
    blind = await opened(replicated.url, held_bytes=0)
    writer, other = await written(store), await written(blind, ids.trajectory("u"))
    finished = await written(store, ids.trajectory("v"))
    primary, replica = await primary_and_replica(replicated)
    await until(lambda: has_streams(replica, 3), what="the replica")
    async with detached(primary, replica):
        assert [await w.append(generation(7)) for w in (writer, other, finished)] == [5, 5, 5]
    await command(replica.url, "CLUSTER", "FAILOVER", "TAKEOVER")
    assert await writer.append(generation(8)) == 6
    with pytest.raises(WrongSequenceError) as caught:
        await other.append(generation(8))
    assert (caught.value.expected, caught.value.actual) == (5, 4)
    assert len(await stored(blind, T)) == 6
    assert len(await stored(blind, finished.stream)) == 5
    found = {
        (loss.stream.name, loss.first_sequence, loss.last_sequence, loss.restored) for loss in await blind.losses()
    }
    assert found == {("t", 5, 5, True), ("v", 5, 5, True)}
    await store.close()
    await blind.close()


async def has_streams(replica: ClusterNode, count: int) -> bool:
    return int(await command(replica.url, "DBSIZE")) >= count + 2


async def test_a_paused_primary_that_wakes_after_its_failover_does_not_let_an_old_writer_in(
    replicated: Cluster,
) -> None:
    old_store = await opened(replicated.url, shards=1)
    old = await written(old_store)
    primary, replica = await primary_and_replica(replicated)
    await until(lambda: has_streams(replica, 1), what="the replica")
    with paused(primary.pid):
        late = asyncio.create_task(old.append(generation(9)))
        await command(replica.url, "CLUSTER", "FAILOVER", "TAKEOVER")
        await until(lambda: all_name(replicated, replica, but=primary), what="the failover")
        new_store = await opened(replicated.url)
        successor, history = await take_over(new_store, T, "b")
        await successor.append(generation(10))
    acknowledged: list[int] = []

    async def refused() -> bool:
        """The woken primary acknowledges until it hears that it is none any more."""
        try:
            acknowledged.append(await (old.append(generation(11)) if late.done() else late))
        except FencedError:
            return True
        return False

    await until(refused, what="the old writer to be refused")
    lost = await new_store.losses()
    assert not any(loss.restored for loss in lost)
    assert {n for loss in lost for n in range(loss.first_sequence, loss.last_sequence + 1)} == set(acknowledged)
    assert [recorded.epoch for recorded in await stored(new_store)] == [1] * len(history[:-1]) + [2, 2]
    await old_store.close()
    await new_store.close()


async def all_name(made: Cluster, primary: ClusterNode, but: ClusterNode) -> bool:
    """Whether all nodes but one name the new primary, so that nobody is led to the old one."""
    for node in made.nodes:
        if node is not but:
            slots = await command(node.url, "CLUSTER", "SLOTS")
            if primary.node_id.encode() not in [bytes(part[2][2]) for part in slots]:
                return False
    return True
