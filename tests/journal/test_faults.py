"""Real faults against real servers: nothing acknowledged is lost unseen, nothing is stored twice, nobody hangs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from belayer import ids
from belayer.errors import CodecError, DamagedJournalError, FencedError, JournalUnavailableError, WrongSequenceError
from belayer.journal.batching import GROUPS
from belayer.journal.embedded import EmbeddedServer, shipped_server
from belayer.journal.writer import StreamWriter, take_over
from tests.journal.faults import Proxy, T, command, generation, lose_the_last_entry, opened, stored, written
from tests.waiting import DEADLINE_S, until


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    """A server that a test may break."""
    async with EmbeddedServer(tmp_path / "r") as server:
        yield server


@pytest.fixture
async def proxy(tmp_path: Path, redis_url: str) -> AsyncIterator[Proxy]:
    async with Proxy(tmp_path, redis_url).running() as proxy:
        yield proxy


# --- lost replies and broken connections ----------------------------------------------------------------------------


async def test_an_append_whose_reply_was_lost_is_stored_once(proxy: Proxy, namespace: str) -> None:
    store = await opened(proxy.url, namespace=namespace)
    writer = await written(store)
    proxy.lose_reply(b"XADD")
    assert await writer.append(generation(7)) == 5
    assert await writer.append(generation(8)) == 6
    assert proxy.lost == 1
    assert [recorded.sequence for recorded in await stored(store)] == [1, 2, 3, 4, 5, 6]
    await store.close()


async def test_a_takeover_whose_reply_was_lost_is_stored_once(proxy: Proxy, namespace: str) -> None:
    store = await opened(proxy.url, namespace=namespace)
    await written(store, count=1)
    proxy.lose_reply(b"EVAL")
    writer, history = await take_over(store, T, "b")
    assert proxy.lost == 1
    assert writer.epoch == 2 and len(history) == 3
    assert len(await stored(store)) == 3
    await store.close()


async def test_a_group_whose_replies_were_lost_is_stored_once(proxy: Proxy, namespace: str) -> None:
    store = await opened(proxy.url, namespace=namespace)
    streams = [ids.trajectory(f"t{number}") for number in range(64)]
    writers = [await written(store, stream, 1) for stream in streams]
    proxy.lose_reply(b"XADD")
    await asyncio.gather(*(writer.append(generation(9)) for writer in writers))
    assert proxy.lost == 1
    for stream in streams:
        assert len(await stored(store, stream)) == 3
    await store.close()


async def test_a_noticed_append_whose_reply_was_lost_has_its_notice(proxy: Proxy, namespace: str) -> None:
    from belayer.journal.events import TrajectoryFinished

    store = await opened(proxy.url, namespace=namespace)
    writer = await written(store)
    proxy.lose_reply(b"XADD")
    await writer.append(TrajectoryFinished("done"))
    async with store.subscribe("g", "c") as notices:
        notice = await notices.next(DEADLINE_S)
        assert notice is not None and notice.tag == "trajectory-finished"
        assert await notices.next(0.01) is None
    await store.close()


async def test_connections_that_break_under_load_lose_and_double_nothing(proxy: Proxy, namespace: str) -> None:
    store = await opened(proxy.url, namespace=namespace)
    streams = [ids.trajectory(f"t{number}") for number in range(16)]
    done = 0

    async def work(writer: StreamWriter) -> None:
        nonlocal done
        for number in range(60):
            await writer.append(generation(number))
            done += 1

    writers = [await written(store, stream, 0) for stream in streams]
    async with asyncio.TaskGroup() as tasks:
        for writer in writers:
            tasks.create_task(work(writer))
        for share in range(1, 6):
            await until(lambda share=share: done > share * 150, what="progress")
            proxy.cut()
    for stream in streams:
        assert [r.event for r in await stored(store, stream)][1:] == [generation(number) for number in range(60)]
    await store.close()


async def test_a_writer_held_up_while_another_takes_over_is_refused(
    proxy: Proxy, redis_url: str, namespace: str
) -> None:
    paused, other = await opened(proxy.url, namespace=namespace), await opened(redis_url, namespace=namespace)
    writer = await written(paused)
    proxy.hold(b"XADD")
    late = asyncio.create_task(writer.append(generation(9)))
    await proxy.held.wait()
    successor, history = await take_over(other, T, "b")
    await successor.append(generation(10))
    proxy.release()
    with pytest.raises(FencedError) as caught:
        await late
    assert (caught.value.epoch, caught.value.current_epoch) == (1, 2)
    assert len(history) == 5
    assert [recorded.epoch for recorded in await stored(other)] == [1, 1, 1, 1, 2, 2]
    await paused.close()
    await other.close()


# --- cancellation and room ------------------------------------------------------------------------------------------


async def test_a_cancelled_append_under_way_is_settled_by_a_retry(proxy: Proxy, namespace: str) -> None:
    store = await opened(proxy.url, namespace=namespace)
    writer = await written(store)
    proxy.hold(b"XADD")
    task = asyncio.create_task(writer.append(generation(9)))
    await proxy.held.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    proxy.release()
    assert await writer.retry() == 5
    assert await writer.append(generation(10)) == 6
    assert len(await stored(store)) == 6
    await store.close()


async def test_an_append_cancelled_while_it_waits_is_not_sent(proxy: Proxy, namespace: str) -> None:
    store = await opened(proxy.url, namespace=namespace)
    writers = [await written(store, ids.trajectory(f"t{number}")) for number in range(GROUPS + 1)]
    proxy.hold(b"XADD")
    appends: list[asyncio.Task[int]] = []
    for writer in writers:
        appends.append(asyncio.create_task(writer.append(generation(9))))
        await asyncio.wait(appends, timeout=0.02)
    appends[-1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await appends[-1]
    proxy.release()
    assert await asyncio.gather(*appends[:-1]) == [5] * GROUPS
    assert await writers[0].append(generation(10)) == 6
    assert len(await stored(store, writers[-1].stream)) == 4
    await store.close()


async def test_callers_wait_for_room_and_nothing_is_dropped(proxy: Proxy, namespace: str) -> None:
    store = await opened(proxy.url, namespace=namespace, waiting_bytes=1000)
    writers = [await written(store, ids.trajectory(f"t{number}"), 1) for number in range(40)]
    proxy.hold(b"XADD")
    appends = [asyncio.create_task(writer.append(generation(9))) for writer in writers]
    await proxy.held.wait()
    await asyncio.wait(appends, timeout=0.05)
    assert store.waiting_bytes <= 1000
    assert not any(append.done() for append in appends)
    proxy.release()
    assert await asyncio.gather(*appends) == [3] * 40
    assert store.waiting_bytes == 0
    await store.close()


async def test_closing_fails_what_waits(proxy: Proxy, namespace: str) -> None:
    store = await opened(proxy.url, namespace=namespace)
    writer = await written(store)
    proxy.hold(b"XADD")
    waiting = asyncio.create_task(writer.append(generation(9)))
    await proxy.held.wait()
    await store.close()
    with pytest.raises(JournalUnavailableError, match="closed"):
        await waiting
    with pytest.raises(JournalUnavailableError, match="closed"):
        await store.last(T)


# --- a server that dies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["everysec", "fsync"])
async def test_a_server_killed_in_mid_append_and_restarted(tmp_path: Path, durability: str) -> None:
    """With fsync every acknowledged event is there. With everysec, what is lost (if anything) is found."""
    settings = {"appendfsync": "always" if durability == "fsync" else "everysec"}
    async with EmbeddedServer(tmp_path / "r", executable=shipped_server(), settings=settings) as server:
        store = await opened(server.url, durability=durability)
        streams = [ids.trajectory(f"t{number}") for number in range(32)]
        acknowledged = dict.fromkeys(streams, 1)
        found_lost = 0
        stop = asyncio.Event()

        async def work(writer: StreamWriter) -> None:
            nonlocal found_lost
            while not stop.is_set():
                try:
                    acknowledged[writer.stream] = await writer.append(generation(writer.sequence))
                except WrongSequenceError:
                    assert durability == "everysec"
                    found_lost += 1
                    return

        writers = [await written(store, stream, 0) for stream in streams]
        async with asyncio.TaskGroup() as tasks:
            for writer in writers:
                tasks.create_task(work(writer))
            for _ in range(3):
                before = sum(acknowledged.values())
                await until(lambda before=before: sum(acknowledged.values()) > before + 400 or found_lost == 32)
                await server.kill()
                await server.start()
            await until(lambda: sum(acknowledged.values()) > before + 800 or found_lost == 32)
            stop.set()
        for writer in writers:
            events = [recorded.event for recorded in await stored(store, writer.stream)][1:]
            assert events == [generation(number + 1) for number in range(len(events))]
            if durability == "fsync":
                assert len(events) + 1 >= acknowledged[writer.stream]
        await store.close()


async def test_lost_acknowledged_events_are_found_not_papered_over(server: EmbeddedServer) -> None:
    store = await opened(server.url, held_bytes=0)
    writer = await written(store)
    await lose_the_last_entry(server)
    with pytest.raises(WrongSequenceError) as caught:
        await writer.append(generation(9))
    assert (caught.value.expected, caught.value.actual) == (4, 3)
    assert len(await stored(store)) == 3
    await store.close()


async def test_a_stream_that_went_on_without_a_lost_event_is_found_damaged(server: EmbeddedServer) -> None:
    """Same epoch, same sequence, another event: only the digest tells."""
    store = await opened(server.url, held_bytes=0)
    writer = await written(store, count=1)
    ours, _ = await take_over(store, T, "b")
    await ours.append(generation(7))
    await lose_the_last_entry(server)
    history = await stored(store)
    rival = StreamWriter(store, T, ours.epoch, history[-1].sequence, history[-1].digest)
    await rival.append(generation(8))
    assert rival.sequence == ours.sequence
    with pytest.raises(DamagedJournalError, match="lost acknowledged events"):
        await ours.append(generation(9))
    assert writer.epoch == 1
    await store.close()


async def test_a_takeover_built_on_a_lost_event_is_refused(server: EmbeddedServer) -> None:
    store = await opened(server.url, held_bytes=0)
    await written(store)
    seen = await store.last(T)
    assert seen is not None
    await lose_the_last_entry(server)
    with pytest.raises(WrongSequenceError):
        await store.take_over(T, seen, seen)
    await store.close()


async def test_a_truncated_tail_of_the_file_loses_only_the_tail(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "r", settings={"appendfsync": "always"}) as server:
        await truncated(server)


async def truncated(server: EmbeddedServer) -> None:
    store = await opened(server.url)
    writer = await written(store)
    await server.kill()
    (aof,) = (server.folder / "appendonlydir").glob("*.incr.aof")
    os.truncate(aof, aof.stat().st_size - 5)
    await server.start()
    reader = await opened(server.url)
    assert len(await stored(reader)) == 3
    await reader.close()
    assert await writer.append(generation(9)) == 5
    await store.close()


async def test_one_damaged_stream_does_not_harm_its_neighbours(proxy: Proxy, redis_url: str, namespace: str) -> None:
    store = await opened(proxy.url, namespace=namespace)
    first, second = await written(store), await written(store, ids.trajectory("u"))
    await command(redis_url, "XADD", f"{{belayer:{namespace}:0}}:s:{T}", "9-9", "x", "y")
    proxy.cut()
    outcomes = await asyncio.gather(first.append(generation(9)), second.append(generation(9)), return_exceptions=True)
    assert isinstance(outcomes[0], CodecError) and outcomes[1] == 5
    await store.close()
