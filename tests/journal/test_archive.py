"""Segments, where they lie, and their upkeep: every damage is found, and prune takes only what may go."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import zstandard
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from belayer import ids
from belayer.actors.archiver import Archiver
from belayer.errors import ArchiveError, ProtocolError
from belayer.ids import StreamId
from belayer.journal import archive_format
from belayer.journal.archive import Archive, created_at, open_archive
from belayer.journal.archive_format import TRAILER_BYTES, SegmentBuilder, read_index, read_part, read_tail
from belayer.journal.archive_storage import LocalStorage, ObjectStorage, open_storage
from belayer.journal.archive_upkeep import prune, rows, verify
from belayer.journal.codec import GENESIS, Entry, encode_entry
from belayer.journal.events import GenerationStarted, StreamArchived
from belayer.journal.memory_store import MemoryStore
from belayer.journal.store import JournalStore
from belayer.journal.writer import StreamWriter, take_over
from tests.archives import ARCHIVER, SteppedStore, Steps, Stopped, across, end_trajectory, history, write_trajectory
from tests.waiting import until

T = ids.trajectory("t")


def entries(count: int, size_bytes: int = 10) -> list[Entry]:
    made: list[Entry] = []
    digest = GENESIS
    for number in range(count):
        event = GenerationStarted(number, "w" * size_bytes, "i")
        entry, digest = encode_entry(1, number, digest, [event], [ids.new_event_id()], 0)
        made.append(entry)
    return made


def segment_of(**streams: list[Entry]) -> bytes:
    builder = SegmentBuilder("n", 0)
    for name, stored in streams.items():
        builder.add(ids.trajectory(name), stored)
    return builder.finish()


def read_whole(content: bytes) -> dict[str, list[Entry]]:
    tail = read_tail("s", content)
    index = read_index("s", tail, content[-tail.length - TRAILER_BYTES : -TRAILER_BYTES])
    found: dict[str, list[Entry]] = {}
    for part in index.parts:
        frame = content[part.offset : part.offset + part.length]
        found.setdefault(part.stream, []).extend(read_part("s", part, frame))
    return found


def test_a_segment_reads_back_part_by_part_and_with_any_zstd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_format, "PART_BYTES", 1000)
    written = {"a": entries(40), "b": entries(1), "c": entries(3, 5000)}
    content = segment_of(**written)
    assert read_whole(content) == {f"trajectory/{name}": stored for name, stored in written.items()}
    frames = zstandard.ZstdDecompressor().stream_reader(content[:-TRAILER_BYTES], read_across_frames=True).read()
    assert all(entry.body in frames for stored in written.values() for entry in stored)


SEGMENT = segment_of(t=entries(5))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_byte_anywhere_is_found(data: st.DataObject) -> None:
    content = SEGMENT
    at = data.draw(st.integers(0, len(content) - 1))
    damaged = content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255))]) + content[at + 1 :]
    with pytest.raises(ArchiveError):
        read_whole(damaged)


@pytest.mark.parametrize("cut", [0, 1, 20, 100])
def test_a_segment_that_was_cut_is_refused(cut: int) -> None:
    content = segment_of(t=entries(5))
    with pytest.raises(ArchiveError):
        read_whole(content[: cut or -1])


@given(st.binary(max_size=300))
def test_any_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ArchiveError):
        read_whole(content)


# --- where segments lie ----------------------------------------------------------------------------------------------


@pytest.fixture(params=["folder", "objects"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "deep" / "archive") if request.param == "folder" else f"memory://archive-{ids.new_suffix()}"


def test_a_storage_keeps_what_was_put(place: str) -> None:
    storage = open_storage(place, "n")
    assert storage.segments() == []
    storage.put("b.segment", b"0123456789")
    storage.put("a.segment", b"01")
    assert storage.segments() == [("a.segment", 2), ("b.segment", 10)]
    assert storage.read("b.segment", 2, 5) == b"234"
    assert storage.read("b.segment", -3, None) == b"789"
    assert storage.read("b.segment", -30, None) == b"0123456789"
    storage.remove("b.segment")
    storage.remove("b.segment")
    assert storage.segments() == [("a.segment", 2)]
    with pytest.raises(ArchiveError, match=r"b\.segment"):
        storage.read("b.segment", 0, 1)


async def test_one_history_across_server_and_archive(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_format, "PART_BYTES", 500)
    store = MemoryStore()
    await end_trajectory(store, "t", await write_trajectory(store, "t", 30))
    expected = await history(store, T)
    archive = open_archive(place, "n")
    assert await Archiver(store, archive, ARCHIVER).archive(["t"]) == {"t": None}
    assert len((await archive.index((await archive.segments())[0].name)).of(T)) > 3
    both = across(store, Path(place), "n")
    both.archive = archive
    assert await history(both, T) == expected
    for after in range(expected[-1].sequence):
        page = await both.read(T, after, 5)
        assert page[0].last_sequence == after + 1
        assert len(page) == min(5, expected[-1].sequence + 1 - after)


class Corrupting(MemoryFileSystem):
    """An object store that changes what it is given."""

    cachable = False
    store: ClassVar[dict[str, Any]] = {}

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, bytes([value[0] ^ 1]) + value[1:], mode, **kwargs)


async def test_an_object_store_that_changes_a_segment_leaves_everything_on_the_server() -> None:
    store = MemoryStore()
    await end_trajectory(store, "t", await write_trajectory(store, "t"))
    before = await store.read(T)
    archive = Archive(ObjectStorage(Corrupting(), "/bucket", "corrupting://bucket"), "n")
    outcomes = await Archiver(store, archive, ARCHIVER).archive(["t"])
    assert "reads back otherwise than it was written" in str(outcomes["t"])
    assert await store.read(T) == before


def test_credentials_in_an_archive_url_are_never_shown() -> None:
    url = "memory://user:geheim@bucket/folder?secret=geheim"
    assert "geheim" not in open_storage(url, "n").shown
    with pytest.raises(Exception, match="cannot be opened") as caught:
        open_storage("nosuch://user:geheim@bucket", "n")
    assert "geheim" not in str(caught.value)


def test_fsspec_is_what_object_stores_are_reached_with() -> None:
    assert isinstance(open_storage("memory://x", "n"), ObjectStorage)
    assert isinstance(open_storage("file:///x", "n"), LocalStorage)
    assert fsspec.core.url_to_fs("memory://x")[0].protocol == "memory"


# --- upkeep ----------------------------------------------------------------------------------------------------------


async def filled(folder: Path, count: int = 3) -> tuple[MemoryStore, Archive]:
    """A server and an archive of `count` segments, a trajectory in each."""
    store, archive = MemoryStore(), Archive(LocalStorage(folder), "n")
    for number in range(count):
        await end_trajectory(store, f"t{number}", await write_trajectory(store, f"t{number}"))
        assert await Archiver(store, archive, ARCHIVER).archive([f"t{number}"]) == {f"t{number}": None}
    return store, archive


async def test_a_whole_archive_is_verified_with_its_marks(tmp_path: Path) -> None:
    store, archive = await filled(tmp_path)
    found = await verify(archive, store)
    assert (found.segments, found.streams, found.problems, found.unnamed) == (3, 6, [], [])
    assert found.events == sum(row.events for row in await rows(archive)) == 3 * 11
    lone = await archive.write([(T, entries(2))])
    assert (await verify(archive, store)).unnamed == [lone]
    assert (await verify(archive)).problems == []


async def test_verify_names_what_is_damaged_missing_or_foreign(tmp_path: Path) -> None:
    store, archive = await filled(tmp_path)
    first, second, third = (tmp_path / row.segment for row in await rows(archive))
    content = bytearray(first.read_bytes())
    content[10] ^= 1
    first.write_bytes(content)
    second.unlink()
    third.write_bytes(b"nothing")
    problems = (await verify(Archive(LocalStorage(tmp_path), "n"), store)).problems
    for path in (first, second, third):
        assert any(path.name in problem for problem in problems), path
    other = Archive(LocalStorage(tmp_path), "other")
    assert any("belongs to namespace 'n', not 'other'" in problem for problem in (await verify(other)).problems)


async def test_a_part_whose_chain_is_broken_is_found(tmp_path: Path) -> None:
    archive = Archive(LocalStorage(tmp_path), "n")
    stored = entries(3)
    await archive.write([(T, [stored[0], entries(3)[1], stored[2]])])
    assert any("does not follow" in problem for problem in (await verify(archive)).problems)


async def test_prune_by_age_and_size_removes_marks_and_segments(tmp_path: Path) -> None:
    store, archive = await filled(tmp_path)
    all_rows = await rows(archive)
    written = created_at(all_rows[0].segment)
    assert written is not None and abs(datetime.now(UTC) - written) < timedelta(minutes=1)
    later = datetime.now(UTC) + timedelta(days=3)
    planned = await prune(archive, store, later, older_than=timedelta(days=1), dry_run=True)
    assert [row.segment for row in planned.removed] == [row.segment for row in all_rows]
    assert len(await store.streams()) == 6
    by_size = await prune(archive, store, later, larger_than_bytes=all_rows[2].size_bytes)
    assert (len(by_size.removed), by_size.streams, by_size.left_bytes) == (2, 4, all_rows[2].size_bytes)
    left = by_size.removed[0].segment, by_size.removed[1].segment
    assert [row.segment for row in await rows(archive)] == [r.segment for r in all_rows if r.segment not in left]
    assert len(await store.streams()) == 2
    assert (await verify(archive, store)).problems == []
    assert (await prune(archive, store, later, older_than=timedelta(days=9))).removed == []


async def test_a_segment_stays_while_a_stream_goes_on_from_it_in_a_younger_one(tmp_path: Path) -> None:
    store, archive = await filled(tmp_path, 1)
    both = across(store, tmp_path, "n")
    writer, _ = await take_over(both, ids.trajectory("t0"), "again")
    await writer.append(GenerationStarted(2, "", ""))
    assert await Archiver(store, archive, ARCHIVER).archive(["t0"]) == {"t0": None}
    first, second = await rows(archive)
    found = await prune(archive, store, datetime.now(UTC), larger_than_bytes=max(first.size_bytes, second.size_bytes))
    assert len(found.kept) + len(found.removed) >= 1
    if found.kept:
        assert (await verify(archive, store)).problems == []
    gone = await prune(archive, store, datetime.now(UTC) + timedelta(days=9), older_than=timedelta(days=1))
    assert gone.kept == [] and await archive.segments() == [] and await store.streams() == []


async def next_segment(store: JournalStore, archive: Archive, *names: str) -> str:
    """These trajectories, which have ended, in a segment that is younger than all others by its name."""
    seconds = {row.created for row in await rows(archive)}
    await until(lambda: datetime.now(UTC).replace(microsecond=0).isoformat() not in seconds, what="the next second")
    before = {row.segment for row in await rows(archive)}
    assert set((await Archiver(store, archive, ARCHIVER).archive(names)).values()) == {None}
    (new,) = {row.segment for row in await rows(archive)} - before
    return new


async def go_on(store: JournalStore, name: str) -> None:
    """Somebody opens an archived trajectory once more and writes in it."""
    writer, _ = await take_over(store, ids.trajectory(name), "again")
    await writer.append(GenerationStarted(2, "", ""))


async def test_prune_takes_a_whole_history_or_nothing_of_it(tmp_path: Path) -> None:
    """`a` is in the first and the second segment, `b` in the second and the third, which stays."""
    store, archive = await filled(tmp_path, 0)
    both = across(store, tmp_path, "n")
    for name in ("a", "b"):
        await end_trajectory(store, name, await write_trajectory(store, name, 2))
    first = await next_segment(store, archive, "a")
    await go_on(both, "a")
    second = await next_segment(store, archive, "a", "b")
    await go_on(both, "b")
    third = await next_segment(store, archive, "b")
    before = [await history(both, ids.trajectory(name)) for name in ("a", "b")]
    third_bytes = next(row.size_bytes for row in await rows(archive) if row.segment == third)
    found = await prune(archive, store, datetime.now(UTC), larger_than_bytes=third_bytes)
    assert (found.removed, found.kept) == ([], [first, second])
    assert [await history(both, ids.trajectory(name)) for name in ("a", "b")] == before
    assert (await verify(archive, store)).problems == []
    await prune(archive, store, datetime.now(UTC) + timedelta(days=9), older_than=timedelta(days=1))
    assert await archive.segments() == [] and await store.streams() == []


async def test_prune_leaves_what_goes_on_on_the_server(tmp_path: Path) -> None:
    store, archive = await filled(tmp_path, 1)
    both = across(store, tmp_path, "n")
    await go_on(both, "t0")
    before = await history(both, ids.trajectory("t0"))
    found = await prune(archive, store, datetime.now(UTC) + timedelta(days=9), older_than=timedelta(days=1))
    assert found.removed == [] and len(found.kept) == 1
    assert await history(both, ids.trajectory("t0")) == before


async def test_prune_stopped_anywhere_leaves_nothing_that_cannot_be_read(tmp_path: Path) -> None:
    later = datetime.now(UTC) + timedelta(days=3)
    for at in range(4):
        store, archive = await filled(tmp_path / str(at), 1)

        class Stopping(SteppedStore):
            async def remove(self, stream: StreamId) -> None:
                await self._stepped(self.live.remove(stream))

        with pytest.raises(Stopped):
            await prune(archive, Stopping(store, Steps(at // 2, bool(at % 2))), later, older_than=timedelta(days=1))
        assert (await verify(archive, store)).problems == []
        assert len((await prune(archive, store, later, older_than=timedelta(days=1))).removed) == 1
        assert await archive.segments() == [] and await store.streams() == []


async def test_prune_leaves_a_journal_alone_that_lost_a_beginning(tmp_path: Path) -> None:
    store, archive = await filled(tmp_path, 1)
    wrong = StreamWriter(store, ids.trajectory("t0"), 1, 0, GENESIS)
    await store.remove(ids.trajectory("t0"))
    with pytest.raises(ProtocolError, match="audit it first"):
        store._streams[ids.trajectory("t0")] = entries(5)[3:]  # pyright: ignore[reportPrivateUsage]
        await prune(archive, store, datetime.now(UTC) + timedelta(days=9), older_than=timedelta(days=1))
    assert wrong.epoch == 1 and len(await archive.segments()) == 1


async def test_a_mark_that_names_what_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    _, archive = await filled(tmp_path, 1)
    name = (await archive.segments())[0].name
    with pytest.raises(ArchiveError, match=f"{name}: does not hold trajectory/t0 up to 99"):
        await archive.read(ids.trajectory("t0"), StreamArchived(99, name), 0, 10)
    with pytest.raises(ArchiveError, match="cannot read gone"):
        await archive.read(ids.trajectory("t0"), StreamArchived(9, f"gone-{os.getpid()}"), 0, 10)
