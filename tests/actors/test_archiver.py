"""Archiving stopped at every single step and begun again: nothing lost, nothing doubled, old writers refused."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from belayer import ids
from belayer.actors.actor import run_actor
from belayer.actors.archiver import GROUP, Archiver
from belayer.actors.reaper import Reaper
from belayer.actors.sandboxes import incarnation_name
from belayer.errors import ArchiveError, DamagedJournalError, FencedError, ProtocolError, WrongSequenceError
from belayer.ids import StreamId
from belayer.journal.archive import Archive, Located
from belayer.journal.archive_storage import LocalStorage
from belayer.journal.codec import Recorded
from belayer.journal.connect import open_store
from belayer.journal.events import GenerationStarted, SandboxSpec
from belayer.journal.memory_store import MemoryStore
from belayer.journal.store import JournalStore, Notice
from belayer.journal.writer import StreamWriter, take_over
from replay.audit import JournalAudit
from replay.stream_audit import StreamAudit
from tests.actors.model import ModelHost
from tests.archives import (
    ARCHIVER,
    SteppedStorage,
    SteppedStore,
    Steps,
    Stopped,
    across,
    end_trajectory,
    whole,
    write_trajectory,
)
from tests.waiting import DEADLINE_S, until

NAMES = ("a", "b")


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, redis_url: str, namespace: str):
    if request.param == "memory":
        yield MemoryStore()
        return
    store = await open_store(redis_url, namespace=namespace, timeout_s=DEADLINE_S)
    yield store
    await store.close()


def archiver(store: JournalStore, folder: Path, namespace: str, steps: Steps | None = None, **options: Any) -> Archiver:
    steps = steps or Steps()
    archive = Archive(SteppedStorage(folder, steps), namespace)
    return Archiver(SteppedStore(store, steps), archive, ARCHIVER, **options)


async def ended(store: JournalStore, names: tuple[str, ...] = NAMES) -> list[StreamWriter]:
    writers = [await write_trajectory(store, name) for name in names]
    for name, writer in zip(names, writers, strict=True):
        await end_trajectory(store, name, writer)
    return writers


async def offline(folder: Path, namespace: str) -> dict[StreamId, list[int]]:
    """The sequences that the archive alone has of each stream, in order."""
    archive = Archive(LocalStorage(folder), namespace)

    async def sequences(parts: list[Located]) -> list[int]:
        entries = [entry for segment, part in parts for entry in await archive.part(segment, part)]
        return [n for entry in entries for n in range(entry.expected_sequence + 1, entry.last_sequence + 1)]

    return {stream: await sequences(parts) for stream, parts in (await archive.streams()).items()}


async def check(store: JournalStore, folder: Path, namespace: str, expected: dict[StreamId, list[Recorded]]) -> None:
    """Both sides together have what was written, once; the archive alone a beginning of it; the audit agrees."""
    both = across(store, folder, namespace)
    assert await whole(both, sorted({stream.name for stream in expected})) == expected
    for stream, sequences in (await offline(folder, namespace)).items():
        assert sequences == list(range(1, len(sequences) + 1))
        assert (await store.last(stream)).last_sequence >= len(sequences)  # type: ignore[union-attr]
    journal = JournalAudit()
    for stream in await both.streams():
        one = StreamAudit(stream)
        one.feed([(stream, entry) for entry in await both.read(stream, 0, 10_000)])
        journal.add(one.close())
    assert journal.report(0.0).findings == []


async def steps_of_a_whole_run(folder: Path) -> int:
    store, steps = MemoryStore(), Steps()
    await ended(store)
    await archiver(store, folder, "n", steps).archive(NAMES)
    return steps.count


async def test_stopped_at_every_step_and_begun_again(store: JournalStore, tmp_path: Path, namespace: str) -> None:
    count = await steps_of_a_whole_run(tmp_path / "count")
    assert count == 1 + 2 * 4
    for at in range(count):
        for after in (False, True):
            names = tuple(f"{name}-{at}-{after}" for name in NAMES)
            folder = tmp_path / f"{at}-{after}"
            writers = await ended(store, names)
            expected = await whole(store, names)
            with pytest.raises(Stopped):
                await archiver(store, folder, namespace, Steps(at, after)).archive(names)
            assert await whole(across(store, folder, namespace), names) == expected
            assert await archiver(store, folder, namespace).archive(names) == dict.fromkeys(names)
            assert await whole(across(store, folder, namespace), names) == expected
            for name, writer in zip(names, writers, strict=True):
                assert len(await store.read(ids.trajectory(name))) == len(await store.read(ids.sandbox(name))) == 1
                with pytest.raises(FencedError):
                    await writer.append(GenerationStarted(2, "", ""))
            sequences = await offline(folder, namespace)
            assert sequences == {s: [r.sequence for r in events] for s, events in expected.items()}


async def test_two_archivers_at_once_archive_each_stream_once(
    store: JournalStore, tmp_path: Path, namespace: str
) -> None:
    await ended(store)
    expected = await whole(store, NAMES)
    first, second = (archiver(store, tmp_path, namespace) for _ in range(2))
    outcomes = await asyncio.gather(first.archive(NAMES), second.archive(NAMES))
    for outcome in outcomes:
        assert all(error is None or isinstance(error, WrongSequenceError) for error in outcome.values())
    assert await first.archive(NAMES) == dict.fromkeys(NAMES)
    await check(store, tmp_path, namespace, expected)


async def test_what_was_opened_again_after_archiving_is_archived_behind_it(
    store: JournalStore, tmp_path: Path, namespace: str
) -> None:
    await ended(store)
    actor = archiver(store, tmp_path, namespace)
    assert await actor.archive(["a"]) == {"a": None}
    both = across(store, tmp_path, namespace)
    writer, history = await take_over(both, ids.trajectory("a"), "rollout")
    assert [recorded.sequence for recorded in history] == list(range(1, 11))
    assert await actor.archive(["a"]) == {"a": None}
    assert len(await store.read(ids.trajectory("a"))) == 2
    await writer.append(GenerationStarted(2, "", ""))
    assert await actor.archive(["a"]) == {"a": None}
    assert len(await store.read(ids.trajectory("a"))) == 1
    expected = [recorded.sequence for recorded in history] + [11]
    fresh = across(store, tmp_path, namespace)
    for after in range(12):
        sequences = [entry.last_sequence for entry in await fresh.read(ids.trajectory("a"), after, 3)]
        assert sequences == [n for n in expected[:7] + expected[8:] + [13] if n > after][:3]
    assert (await offline(tmp_path, namespace))[ids.trajectory("a")] == expected


async def test_what_has_not_ended_or_is_damaged_stays(store: JournalStore, tmp_path: Path, namespace: str) -> None:
    await write_trajectory(store, "open")
    (writer,) = await ended(store, ("good",))
    wrong = StreamWriter(store, ids.trajectory("bad"), 1, 0, b"x" * 16)
    await wrong.append(GenerationStarted(1, "", ""))
    outcomes = await archiver(store, tmp_path, namespace).archive(["open", "good", "bad"])
    assert isinstance(outcomes["open"], ProtocolError) and "has not ended" in str(outcomes["open"])
    assert isinstance(outcomes["bad"], DamagedJournalError)
    assert outcomes["good"] is None
    assert len(await store.read(ids.trajectory("open"))) == 6
    assert len(await store.read(ids.trajectory("bad"))) == 1
    assert writer.stream in await offline(tmp_path, namespace)


async def test_a_storage_that_fails_leaves_everything_on_the_server(tmp_path: Path) -> None:
    store = MemoryStore()
    await ended(store)
    before = [await store.read(stream) for stream in await store.streams()]
    (tmp_path / "file").touch()
    outcomes = await archiver(store, tmp_path / "file" / "folder", "n").archive(NAMES)
    assert all(isinstance(outcomes[name], ArchiveError) for name in NAMES)
    assert [await store.read(stream) for stream in await store.streams()] == before


async def test_the_actor_collects_and_archives_what_finishes(
    store: JournalStore, tmp_path: Path, namespace: str
) -> None:
    names = [f"t{number}" for number in range(20)]
    actor = archiver(store, tmp_path, namespace, linger_s=0.05, patience_s=DEADLINE_S)
    working = asyncio.create_task(run_actor(store, actor, GROUP, "c"))
    writers = [await write_trajectory(store, name) for name in names]
    await asyncio.gather(*(end_trajectory(store, n, w) for n, w in zip(names, writers, strict=True)))

    async def all_trimmed() -> bool:
        return all([len(await store.read(stream)) == 1 for stream in await store.streams()])

    await until(all_trimmed, what="every stream trimmed to its mark")
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    assert len(await offline(tmp_path, namespace)) == 40
    assert len(list(tmp_path.iterdir())) < 20


async def test_a_container_that_a_dead_reaper_left_is_removed_after_archiving_too(tmp_path: Path) -> None:
    """The journal says 'removed' before it is done, so the archiver may come in between."""
    store, host = MemoryStore(), ModelHost()
    made = await host.create("run", "t", incarnation_name("t", 1), SandboxSpec("image"))
    await end_trajectory(store, "t", await write_trajectory(store, "t"))
    assert await archiver(store, tmp_path, "n").archive(["t"]) == {"t": None}
    reaper = Reaper(store, host, None, "host", "actors/reaper")  # type: ignore[arg-type]
    assert await host.incarnations() == [made.name]
    await reaper.handle(Notice(ids.trajectory("t"), "trajectory-finished", "1"))
    assert await host.incarnations() == []


class Archiving(RuleBasedStateMachine):
    """Writers, archivers that stop anywhere, takeovers and stale writers in any order, against what was written."""

    url: str | None = None

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.temporary = tempfile.TemporaryDirectory(prefix="belayer-test-")
        self.folder = Path(self.temporary.name)
        self.namespace = f"test-{ids.new_suffix()}"
        self.store: JournalStore = MemoryStore()
        if self.url is not None:
            self.store = self.run(open_store(self.url, namespace=self.namespace))
        self.stale: list[StreamWriter] = []
        self.names: list[str] = []
        self.finished: list[str] = []
        self.expected: dict[StreamId, list[Recorded]] = {}

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(call)

    @rule(chunks=st.integers(0, 3), finished=st.booleans())
    def write(self, chunks: int, finished: bool) -> None:
        name = f"t{len(self.names)}"
        self.names.append(name)
        writer = self.run(write_trajectory(self.store, name, chunks))
        if finished:
            self.run(end_trajectory(self.store, name, writer))
            self.finished.append(name)
            self.stale.append(writer)
        self.expected |= self.run(whole(self.store, [name]))

    @precondition(lambda self: self.finished)
    @rule(at=st.integers(0, 12), after=st.booleans())
    def stop_archiving(self, at: int, after: bool) -> None:
        with contextlib.suppress(Stopped):
            self.run(archiver(self.store, self.folder, self.namespace, Steps(at, after)).archive(self.finished))

    @precondition(lambda self: self.finished)
    @rule()
    def archive(self) -> None:
        outcomes = self.run(archiver(self.store, self.folder, self.namespace).archive(self.finished))
        assert outcomes == dict.fromkeys(self.finished)
        for name in self.finished:
            first = self.run(self.store.read(ids.trajectory(name)))[0]
            assert first.expected_sequence > 0

    @precondition(lambda self: self.finished)
    @rule(data=st.data())
    def take_over(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.finished))
        both = across(self.store, self.folder, self.namespace)
        writer, history = self.run(take_over(both, ids.trajectory(name), "again"))
        self.stale.append(writer)
        self.expected[writer.stream].append(history[-1])

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def stale_writer(self, data: st.DataObject) -> None:
        writer = data.draw(st.sampled_from(self.stale))
        last = self.run(self.store.last(writer.stream))
        if last.epoch > writer.epoch:
            with pytest.raises(FencedError):
                self.run(
                    StreamWriter(self.store, writer.stream, writer.epoch, writer.sequence, b"x" * 16).append(
                        GenerationStarted(9, "", "")
                    )
                )

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if hasattr(self, "expected"):
            self.run(check(self.store, self.folder, self.namespace, self.expected))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.run(self.store.close())
            self.loop.close()
            self.temporary.cleanup()


def run_machine(url: str | None, examples: int) -> None:
    machine = type("Archiving", (Archiving,), {"url": url}).TestCase
    machine.settings = settings(
        max_examples=examples, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
    )
    machine("runTest").runTest()


@pytest.mark.parametrize("server", ["memory", "redis"])
def test_any_order_of_writing_archiving_stopping_and_taking_over(server: str, redis_url: str) -> None:
    run_machine(None if server == "memory" else redis_url, 25 if server == "memory" else 10)
