"""The end of a run: everything of it is removed, whoever comes between and whatever cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from belayer import ids
from belayer.actors.reaper import Reaper
from belayer.actors.sandboxes import create_sandbox, look
from belayer.errors import JournalUnavailableError
from belayer.gpu.recorded_host import RecordedEngineHost
from belayer.ids import StreamId, StreamKind
from belayer.journal.codec import Entry
from belayer.journal.events import FailureDetected, RunStarted, SandboxSpec, WorkerReady, WorkerRegistered
from belayer.journal.memory_store import MemoryStore
from belayer.journal.store import Notice
from belayer.journal.writer import Reader, take_over
from belayer.projections import run, worker
from tests.actors.model import ModelHost

HOST = "host"


class Crowded(MemoryStore):
    """Somebody is always faster once: the first append after each takeover of the reaper's finds another epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.overtaken: set[StreamId] = set()
        self.armed = False

    async def append(self, stream: StreamId, entry: Entry, notice_tag: str | None = None) -> None:
        if self.armed and stream not in self.overtaken:
            self.overtaken.add(stream)
            await take_over(self, stream, "a detector")
        await super().append(stream, entry, notice_tag)


class Away(MemoryStore):
    """Does not answer for the first so many questions for the workers."""

    silent = 0

    async def streams(self, kind: StreamKind | None = None) -> list[StreamId]:
        if kind is StreamKind.WORKER and self.silent:
            self.silent -= 1
            raise JournalUnavailableError("here", 0.0, "it is being restarted")
        return list(await super().streams(kind))


async def a_run(store: MemoryStore, host: ModelHost) -> None:
    """A run whose owner is gone, with two workers and two sandboxes."""
    writer, _ = await take_over(store, ids.run("run"), "owner")
    await writer.append(RunStarted(HOST, 9_000_001, 1, "memory", "test"))
    for name in ("w1", "w2"):
        engine, _ = await take_over(store, ids.worker(name), "owner")
        await engine.append(
            WorkerRegistered(f"{name}-e1", "main", HOST, 9_000_002, 1, "", "run"), WorkerReady(f"{name}-e1", 0)
        )
    for name in ("s1", "s2"):
        await create_sandbox(store, host, "run", name, SandboxSpec("image"), "owner")


async def is_over(store: MemoryStore, host: ModelHost) -> bool:
    workers = [worker.fold(await Reader(store, ids.worker(name)).catch_up()) for name in ("w1", "w2")]
    boxes = [await look(store, name) for name in ("s1", "s2")]
    return (
        all(engine.status == "removed" for state in workers for engine in state.engines.values())
        and all(box.phase == "removed" for box in boxes)
        and run.fold(await Reader(store, ids.run("run")).catch_up()).finished
        and not host.containers
    )


def reaper(store: MemoryStore, host: ModelHost, tmp_path: Path) -> Reaper:
    return Reaper(store, host, RecordedEngineHost(tmp_path, tmp_path, owner_pid=os.getpid()), HOST, "actors/reaper")


NOTICE = Notice(ids.run("run"), "run-started", "1")


async def test_others_who_write_meanwhile_keep_nothing_from_being_removed(tmp_path: Path) -> None:
    store, host = Crowded(), ModelHost()
    await a_run(store, host)
    store.armed = True
    await reaper(store, host, tmp_path).handle(NOTICE)
    assert await is_over(store, host)


async def test_a_stream_that_cannot_be_read_keeps_nothing_else_from_being_removed(tmp_path: Path) -> None:
    store, host = MemoryStore(), ModelHost()
    await a_run(store, host)
    for stream in (ids.worker("another"), ids.sandbox("another")):
        writer, _ = await take_over(store, stream, "somebody")
        await writer.append(FailureDetected("x", "died", "", "somebody"))
        await store.trim(stream, (await store.read(stream))[-1])  # its beginning is gone
    await reaper(store, host, tmp_path).handle(NOTICE)
    assert await is_over(store, host)


async def test_a_journal_that_is_away_is_asked_again(tmp_path: Path) -> None:
    store, host = Away(), ModelHost()
    await a_run(store, host)
    store.silent = 1
    with pytest.raises(JournalUnavailableError):  # the notice is not done
        await reaper(store, host, tmp_path).handle(NOTICE)
    assert not host.containers, "by their label"
    await reaper(store, host, tmp_path).handle(NOTICE)
    assert await is_over(store, host)
