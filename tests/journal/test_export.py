"""An export is read back as it was written, or the damage is named with file and offset."""

from __future__ import annotations

from pathlib import Path

import pytest

from belayer import ids
from belayer.errors import CodecError, InputError
from belayer.journal.export import ExportWriter, export_streams, read_export
from belayer.journal.memory_store import MemoryStore
from belayer.journal.store import JournalStore
from tests.journal.faults import command, generation, written

STREAMS = [ids.trajectory("a"), ids.sandbox("a"), ids.trajectory("b")]


async def exported(store: JournalStore, path: Path) -> Path:
    for number, stream in enumerate(STREAMS):
        await written(store, stream, number * 5)
    assert await export_streams(store, STREAMS, path) == 3 + 15
    return path


async def test_what_was_exported_is_read_back(tmp_path: Path, redis_store: JournalStore) -> None:
    path = await exported(redis_store, tmp_path / "j.belayer")
    read = list(read_export(path))
    assert read == [(stream, entry) for stream in STREAMS for entry in await redis_store.read(stream)]
    assert list(tmp_path.iterdir()) == [path]


async def test_only_the_wanted_streams(tmp_path: Path) -> None:
    path = await exported(MemoryStore(), tmp_path / "j")
    assert {stream for stream, _ in read_export(path, lambda stream: stream.name == "b")} == {STREAMS[2]}


async def test_an_empty_journal(tmp_path: Path) -> None:
    assert await export_streams(MemoryStore(), [], tmp_path / "j") == 0
    assert list(read_export(tmp_path / "j")) == []


async def test_a_file_cut_anywhere_is_known_to_be(tmp_path: Path) -> None:
    path = await exported(MemoryStore(), tmp_path / "j")
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CodecError) as caught:
            list(read_export(path))
        assert caught.value.where.startswith(f"{path} at byte ")


async def test_a_changed_byte_anywhere_is_found(tmp_path: Path) -> None:
    path = await exported(MemoryStore(), tmp_path / "j")
    whole = path.read_bytes()
    for at in range(0, len(whole), 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(CodecError, match=str(path)):
            list(read_export(path))


async def test_bytes_after_the_end_are_found(tmp_path: Path) -> None:
    path = await exported(MemoryStore(), tmp_path / "j")
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CodecError):
        list(read_export(path))


async def test_an_export_that_fails_leaves_nothing(
    tmp_path: Path, redis_store: JournalStore, redis_url: str, namespace: str
) -> None:
    for stream in STREAMS:
        await written(redis_store, stream, 0)
    await command(redis_url, "XADD", f"{{belayer:{namespace}:0}}:s:{STREAMS[2]}", "9-9", "x", "y")
    with pytest.raises(CodecError, match="not one of Belayer's"):
        await export_streams(redis_store, STREAMS, tmp_path / "j")
    assert list(tmp_path.iterdir()) == []


async def test_an_older_export_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = await exported(MemoryStore(), tmp_path / "j")
    store = MemoryStore()
    writer = await written(store, STREAMS[0], 1)
    await writer.append(generation(2))
    assert await export_streams(store, STREAMS[:1], path) == 3
    assert len(list(read_export(path))) == 3


def test_a_missing_file_and_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        list(read_export(tmp_path / "none"))
    with pytest.raises(CodecError, match="not an export"):
        (tmp_path / "text").write_text("hello, world")
        list(read_export(tmp_path / "text"))


async def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="choose another place"):
        await export_streams(MemoryStore(), [], tmp_path / "no" / "j")


async def test_two_exports_to_one_place_at_once_leave_one_of_them(tmp_path: Path) -> None:
    """They wrote into the same file beside it: the first one left a mixture, and the second one failed."""
    store = MemoryStore()
    await written(store, STREAMS[0], 3)
    (first, *rest) = await store.read(STREAMS[0])
    with ExportWriter(tmp_path / "j") as one:
        one.add(STREAMS[0], first)
        with ExportWriter(tmp_path / "j") as other:
            other.add(STREAMS[0], first)
            for entry in rest:
                other.add(STREAMS[0], entry)
        assert len(list(read_export(tmp_path / "j"))) == 4
    assert list(read_export(tmp_path / "j")) == [(STREAMS[0], first)]
    assert [path.name for path in tmp_path.iterdir()] == ["j"]
