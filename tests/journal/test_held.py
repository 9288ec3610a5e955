"""What was acknowledged and lost by the server is stored again by whoever still holds it, found and reported."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from belayer import ids
from belayer.errors import DamagedJournalError, FencedError, WrongSequenceError
from belayer.journal import held, restoring
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.events import TrajectoryFinished
from belayer.journal.store import JournalStore
from belayer.journal.writer import Reader, take_over
from tests.journal.faults import T, generation, lose_the_last_entry, opened, stored, two_stores, written
from tests.waiting import DEADLINE_S, until


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    """A server that a test may break."""
    async with EmbeddedServer(tmp_path / "r") as server:
        yield server


async def lose_everything(server: EmbeddedServer) -> None:
    """A failover to a replica that had nothing yet."""
    await server.stop()
    for file in (server.folder / "appendonlydir").iterdir():
        file.unlink()
    await server.start()


async def test_a_lost_event_is_stored_again_before_the_next_one(server: EmbeddedServer) -> None:
    store = await opened(server.url)
    writer = await written(store)
    before = await stored(store)
    await lose_the_last_entry(server)
    assert await writer.append(generation(9)) == 5
    assert (await stored(store))[:4] == before
    (loss,) = await store.losses()
    assert (loss.stream, loss.epoch, loss.first_sequence, loss.last_sequence, loss.restored) == (T, 1, 4, 4, True)
    await store.close()


async def test_what_is_held_is_nothing_for_the_garbage_collector_to_walk(server: EmbeddedServer) -> None:
    """It would stop the process for 30 ms when much is held."""
    store = await opened(server.url)
    writer = await written(store)
    gc.collect()
    before = len(gc.get_objects())
    for number in range(500):
        await writer.append(generation(9 + number))
    gc.collect()
    grown = len(gc.get_objects()) - before
    assert grown < 400
    await store.close()


async def test_an_idle_writer_stores_again_what_was_lost(server: EmbeddedServer) -> None:
    """A trajectory that was finished has no next append."""
    store, reader = await opened(server.url), await opened(server.url)
    writer = await written(store)
    await writer.append(TrajectoryFinished("done"))
    before = await stored(reader)
    await lose_the_last_entry(server)
    await until(lambda: is_stored(reader, len(before)), what="the lost event")
    assert await stored(reader) == before
    await store.close()
    await reader.close()


async def is_stored(store: JournalStore, count: int) -> bool:
    return len(await stored(store)) == count


async def test_whole_streams_with_their_takeovers_and_notices_are_stored_again(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "HELD_S", 600.0)  # a busy machine takes longer than usual for the next lines
    store = await opened(server.url)
    streams = [ids.trajectory(f"t{number}") for number in range(300)]
    for stream in streams:
        await written(store, stream, 2)
    second, _ = await take_over(store, streams[0], "b")
    await second.append(TrajectoryFinished("done"))
    before = [await stored(store, stream) for stream in streams]
    await lose_everything(server)
    await second.append(generation(1))
    assert [await stored(store, stream) for stream in streams[1:]] == before[1:]
    assert (await stored(store, streams[0]))[:-1] == before[0]
    assert await store.streams() == sorted(streams)
    assert len(await store.losses()) == 300
    async with store.subscribe("g", "c") as notices:
        notice = await notices.next(DEADLINE_S)
        assert notice is not None and notice.tag == "trajectory-finished"
    await store.close()


async def test_what_another_writer_went_on_without_is_reported_and_not_stored(
    tmp_path: Path, server: EmbeddedServer
) -> None:
    async with two_stores(tmp_path, server) as (proxy, store, other):
        writer = await written(store)
        proxy.hold(b"INFO")
        await lose_the_last_entry(server)
        successor, history = await take_over(other, T, "b")
        await successor.append(generation(7))
        assert len(history) == 4
        proxy.release()
        with pytest.raises(FencedError):
            await writer.append(generation(9))
        (loss,) = await other.losses()
        assert (loss.stream, loss.epoch, loss.first_sequence, loss.last_sequence, loss.restored) == (T, 1, 4, 4, False)
        assert [recorded.epoch for recorded in await stored(other)] == [1, 1, 1, 2, 2]


async def test_writers_that_followed_each_other_store_their_parts_in_order(
    tmp_path: Path, server: EmbeddedServer
) -> None:
    """The later one finds a gap and waits; the earlier one comes back only then."""
    async with two_stores(tmp_path, server) as (proxy, earlier, later):
        await written(earlier)
        writer, _ = await take_over(later, T, "b")
        await writer.append(generation(7))
        before = await stored(later)
        proxy.hold(b"INFO")
        await lose_the_last_entry(server, 3)
        waiting = asyncio.create_task(writer.append(generation(8)))
        await asyncio.wait([waiting], timeout=0.2)
        assert not waiting.done()
        proxy.release()
        assert await waiting == 7
        assert (await stored(later))[:6] == before
        losses = [(loss.first_sequence, loss.last_sequence, loss.restored) for loss in await later.losses()]
        assert losses == [(4, 4, True), (5, 6, True)]


async def test_a_gap_that_nobody_fills_is_told_in_the_end(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoring, "GAP_S", 0.5)
    store, other = await opened(server.url), await opened(server.url, held_bytes=0)
    await written(other)
    writer, _ = await take_over(store, T, "b")
    await lose_the_last_entry(server, 2)
    with pytest.raises(WrongSequenceError) as caught:
        await writer.append(generation(8))
    assert (caught.value.expected, caught.value.actual) == (5, 3)
    (loss,) = await store.losses()
    assert (loss.first_sequence, loss.last_sequence, loss.restored) == (5, 5, False)
    await store.close()
    await other.close()


async def test_what_waits_behind_a_gap_is_held_however_old_it_is(
    tmp_path: Path, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first append to another stream let go of it, so it was lost although both writers held their parts."""
    async with two_stores(tmp_path, server) as (proxy, earlier, later):
        await written(earlier)
        writer, _ = await take_over(later, T, "b")
        await writer.append(generation(7))
        before = await stored(later)
        proxy.hold(b"INFO")
        await lose_the_last_entry(server, 3)
        waiting = asyncio.create_task(writer.append(generation(8)))
        await asyncio.wait([waiting], timeout=0.2)
        monkeypatch.setattr(held, "HELD_S", 0.0)
        await written(later, ids.trajectory("u"))
        proxy.release()
        assert await waiting == 7
        assert (await stored(later))[:6] == before


async def test_a_gap_ends_when_nothing_behind_it_is_held(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looked at it any more, and the writer was put off until its deadline, at every try."""
    monkeypatch.setattr(restoring, "GAP_S", 1.5)
    store, other = await opened(server.url), await opened(server.url, held_bytes=0)
    await written(other)
    writer, _ = await take_over(store, T, "b")
    await lose_the_last_entry(server, 2)
    waiting = asyncio.create_task(writer.append(generation(8)))
    await asyncio.wait([waiting], timeout=0.2)
    await store.remove(T)
    with pytest.raises(WrongSequenceError):
        await waiting
    await store.close()
    await other.close()


async def test_a_lost_takeover_is_not_stored_again_over_the_writer_that_it_had_fenced(
    tmp_path: Path, server: EmbeddedServer
) -> None:
    async with two_stores(tmp_path, server) as (proxy, store, other):
        old = await written(other)
        new, _ = await take_over(store, T, "b")
        proxy.hold(b"INFO")
        await lose_the_last_entry(server)
        assert await old.append(generation(7)) == 5
        proxy.release()
        with pytest.raises(DamagedJournalError, match="lost acknowledged events"):
            await new.append(generation(9))
        (loss,) = await other.losses()
        assert (loss.epoch, loss.first_sequence, loss.restored) == (2, 5, False)
        assert [recorded.epoch for recorded in await stored(other)] == [1] * 5


async def test_a_removed_stream_does_not_come_back(server: EmbeddedServer) -> None:
    store, other = await opened(server.url), await opened(server.url)
    await written(store)
    await written(store, ids.trajectory("u"))
    await other.remove(T)
    await server.kill()
    await server.start()
    await written(store, ids.trajectory("v"))
    assert await other.streams() == [ids.trajectory("u"), ids.trajectory("v")]
    assert await store.losses() == []
    await store.close()
    await other.close()


async def test_a_writer_that_holds_nothing_finds_what_was_lost(server: EmbeddedServer) -> None:
    store = await opened(server.url, held_bytes=0)
    writer = await written(store)
    await lose_the_last_entry(server)
    with pytest.raises(WrongSequenceError):
        await writer.append(generation(9))
    assert await store.losses() == []
    await store.close()


async def test_a_takeover_reads_again_when_what_it_read_is_gone(tmp_path: Path, server: EmbeddedServer) -> None:
    """An event may be read before it is acknowledged, and be lost then."""
    async with two_stores(tmp_path, server, held_bytes=0) as (proxy, store, other):
        await written(other)
        proxy.hold(b"EVAL")
        taking = asyncio.create_task(take_over(store, T, "b"))
        await proxy.held.wait()
        await lose_the_last_entry(server)
        proxy.release()
        writer, history = await taking
        assert [recorded.sequence for recorded in history] == [1, 2, 3, 4]
        assert [recorded.epoch for recorded in history] == [1, 1, 1, 2]
        assert await writer.append(generation(9)) == 5


async def test_a_stream_that_begins_anew_after_a_removal_is_stored_again(server: EmbeddedServer) -> None:
    store, other = await opened(server.url), await opened(server.url)
    await written(other)
    await other.remove(T)
    writer = await written(store)
    before = await stored(store)
    await lose_the_last_entry(server, 2)
    assert await writer.append(generation(9)) == 5
    assert (await stored(store))[:4] == before
    await store.close()
    await other.close()


async def test_a_reader_of_what_was_lost_is_told_when_an_older_epoch_goes_on(server: EmbeddedServer) -> None:
    """It read nothing more, although the stream grew, and asked again without a pause."""
    store, other = await opened(server.url), await opened(server.url, held_bytes=0)
    old = await written(store)
    await take_over(other, T, "b")
    reader = Reader(other, T)
    assert len(await reader.catch_up()) == 5
    await lose_the_last_entry(server)
    assert [await old.append(generation(number)) for number in (7, 8)] == [5, 6]
    assert await reader.wait(5.0)
    with pytest.raises(DamagedJournalError, match="epoch fell to 1"):
        await reader.catch_up()
    await store.close()
    await other.close()
