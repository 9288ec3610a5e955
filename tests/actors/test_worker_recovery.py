"""Several recoveries at one worker, with real engine processes: one hands over, the others wait for it."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from belayer import ids
from belayer.actors.detector import Detector
from belayer.actors.reports import report_engine_failure
from belayer.actors.worker_recovery import START_TRIES, WorkerRecovery, look, process_of
from belayer.errors import (
    EngineFailedError,
    FencedError,
    JournalUnavailableError,
    UnguardedMainError,
    WrongSequenceError,
)
from belayer.gpu.protocol import EngineProcess, Handover
from belayer.gpu.recorded_host import RecordedEngineHost
from belayer.gpu.recorded_prefix import ASSISTANT, END, USER, TokenRecording
from belayer.ids import StreamId
from belayer.journal.codec import Entry
from belayer.journal.events import EpochStarted, FailureDetected, HandoverCompleted, WorkerRemoved
from belayer.journal.memory_store import MemoryStore
from belayer.journal.store import Notice
from belayer.journal.writer import Reader, take_over
from belayer.processes import host_name, is_alive, start_ticks
from belayer.projections.worker import WorkerState
from tests.waiting import DEADLINE_S, until, within


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[RecordedEngineHost]:
    recording = TokenRecording("r", [USER, 1, END, ASSISTANT], [[2, END]])
    (tmp_path / "r.recording.json").write_bytes(msgspec.json.encode(recording))
    yield RecordedEngineHost(tmp_path, tmp_path / "log", owner_pid=os.getpid())


class Unguarded(RecordedEngineHost):
    """Engines whose memory server is gone; the main is never idle."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder / "log", owner_pid=os.getpid())
        self.asked: asyncio.Queue[float] = asyncio.Queue()
        self.may_go_on = asyncio.Event()

    async def start(self, incarnation: str, role: Literal["main", "shadow"]) -> EngineProcess:
        if role == "shadow":
            raise UnguardedMainError(incarnation, "cannot stand by")
        return await super().start(incarnation, role)

    async def until_idle(self, engine: EngineProcess, timeout_s: float) -> bool:
        self.asked.put_nowait(timeout_s)
        await self.may_go_on.wait()
        return False


class Trained(RecordedEngineHost):
    """Engines whose weights have a version, as the memory server says it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder / "log", owner_pid=os.getpid())
        self.version = 7
        self.updated = asyncio.Event()

    async def weight_versions(self) -> AsyncGenerator[int]:
        told = -1
        while True:
            if told != self.version:
                told = self.version
                yield told
            self.updated.clear()
            await self.updated.wait()

    async def promote(self, shadow: EngineProcess, old: EngineProcess | None = None) -> Handover:
        return replace(await super().promote(shadow, old), weight_version=self.version)


async def recover(recovery: WorkerRecovery) -> None:
    """As the actors' loop does it: whoever was overtaken looks again."""
    while True:
        try:
            return await recovery.recover("w")
        except (FencedError, WrongSequenceError):
            continue


async def test_many_recoveries_at_once_hand_over_once(engines: RecordedEngineHost) -> None:
    store = MemoryStore()
    recoveries = [
        WorkerRecovery(store, engines, host_name(), f"actors/elsewhere-{number}-ab", patience_s=1000.0)
        for number in range(1, 3)
    ]
    state = await recoveries[0].start("w", "run")
    try:
        await recover(recoveries[0])
        state = await look(store, "w")
        assert state.serving is not None and state.shadow is not None
        main, shadow = state.serving.registered, state.shadow.registered
        os.kill(main.pid, signal.SIGKILL)
        await report_engine_failure(store, "w", main.incarnation, "died", "killed", "test")
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(recover(recoveries[number % 2]) for number in range(8)))
        state = await look(store, "w")
        assert state.main == shadow.incarnation and state.handovers == 1
        assert state.serving is not None and state.shadow is not None
        events = [recorded.event for recorded in await Reader(store, ids.worker("w")).catch_up()]
        assert sum(isinstance(event, HandoverCompleted) for event in events) == 1
        assert sum(isinstance(event, EpochStarted) for event in events) < 30
    finally:
        await _kill_all(engines, await look(store, "w"))
    assert not is_alive(main.pid, main.pid_start_ticks)


@pytest.mark.parametrize("second", ["died", "unreachable"])
async def test_a_second_death_soon_after_excludes_the_worker(
    engines: RecordedEngineHost, second: Literal["died", "unreachable"]
) -> None:
    """The second one is said by the detector, or by a gateway on another host that was faster."""
    store = MemoryStore()
    recovery = WorkerRecovery(store, engines, host_name(), "actors/elsewhere-1-ab", relapse_s=600.0)
    await recovery.start("w", "run")
    await recover(recovery)
    try:
        for kind in ("died", second):
            main = (await look(store, "w")).engines[(await look(store, "w")).main].registered
            os.kill(main.pid, signal.SIGKILL)
            await report_engine_failure(store, "w", main.incarnation, kind, "killed", "test")
            await recover(recovery)
        state = await look(store, "w")
        assert state.handovers == 1 and state.serving is None
        assert "a second main died within" in state.excluded
        history = [recorded.event for recorded in await Reader(store, ids.worker("w")).catch_up()]
        failures = [event.kind for event in history if isinstance(event, FailureDetected)]
        assert failures == ["died", second, "gpu"]
        assert {engine.status for engine in state.engines.values()} == {"removed"}
        for engine in state.engines.values():
            assert not is_alive(engine.registered.pid, engine.registered.pid_start_ticks)
        await recover(recovery)
        assert (await look(store, "w")).sequence == state.sequence, "nothing is started for it any more"
    finally:
        await _kill_all(engines, await look(store, "w"))


async def test_deaths_far_apart_are_no_relapse(engines: RecordedEngineHost) -> None:
    store = MemoryStore()
    recovery = WorkerRecovery(store, engines, host_name(), "actors/elsewhere-1-ab", relapse_s=0.001)
    await recovery.start("w", "run")
    await recover(recovery)
    try:
        for _ in range(2):
            state = await look(store, "w")
            main = state.engines[state.main].registered
            os.kill(main.pid, signal.SIGKILL)
            await report_engine_failure(store, "w", main.incarnation, "died", "killed", "test")
            await recover(recovery)
        state = await look(store, "w")
        assert state.handovers == 2 and state.serving is not None and not state.excluded
    finally:
        await _kill_all(engines, await look(store, "w"))


async def test_an_engine_is_called_ready_with_the_version_that_memory_holds(tmp_path: Path) -> None:
    """A main started anew over ready weights, the same one after an update, and the shadow that takes over."""
    recording = TokenRecording("r", [USER, 1, END, ASSISTANT], [[2, END]])
    (tmp_path / "r.recording.json").write_bytes(msgspec.json.encode(recording))
    engines = Trained(tmp_path)
    store = MemoryStore()
    recovery = WorkerRecovery(store, engines, host_name(), "actors/elsewhere-1-ab")

    async def serves(version: int) -> bool:
        serving = (await look(store, "w")).serving
        return serving is not None and serving.weight_version == version

    watching: asyncio.Task[None] | None = None
    try:
        await recovery.start("w", "run")
        assert await serves(7)
        await recover(recovery)
        detector = Detector(store, engines, host_name(), "actors/elsewhere-2-ab")
        watching = asyncio.create_task(detector.handle(Notice(ids.worker("w"), "worker-registered", "1")))
        engines.version = 8
        await until(lambda: _updated_and(engines, serves(8)), what="the new version in the journal")
        engines.version = 9  # committed a moment before the main dies: nobody could say so
        main = (await look(store, "w")).engines[(await look(store, "w")).main].registered
        watching.cancel()
        os.kill(main.pid, signal.SIGKILL)
        await report_engine_failure(store, "w", main.incarnation, "died", "killed", "test")
        await recover(recovery)
        state = await look(store, "w")
        assert state.handovers == 1 and await serves(9)
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await _kill_all(engines, await look(store, "w"))


async def test_a_main_without_its_memory_server_is_drained_for_a_while_and_then_replaced(tmp_path: Path) -> None:
    recording = TokenRecording("r", [USER, 1, END, ASSISTANT], [[2, END]])
    (tmp_path / "r.recording.json").write_bytes(msgspec.json.encode(recording))
    engines = Unguarded(tmp_path)
    store = MemoryStore()
    recovery = WorkerRecovery(store, engines, host_name(), "actors/elsewhere-1-ab", relapse_s=600.0, drain_s=90.0)
    try:
        first = (await recovery.start("w", "run")).serving
        assert first is not None
        renewing = asyncio.create_task(recover(recovery))
        assert await within(engines.asked.get()) == 90.0
        draining = (await look(store, "w")).serving
        assert draining is not None and "cannot stand by" in draining.draining, "it serves on"
        engines.may_go_on.set()
        await within(renewing)
        second = (await look(store, "w")).serving
        assert (
            second is not None and not second.draining and second.registered.incarnation != first.registered.incarnation
        )
        assert not is_alive(first.registered.pid, first.registered.pid_start_ticks)
        assert (
            "replaced after 90 s, not idle" in (await look(store, "w")).engines[first.registered.incarnation].evidence
        )
        os.kill(second.registered.pid, signal.SIGKILL)
        await report_engine_failure(store, "w", second.registered.incarnation, "died", "killed", "test")
        engines.may_go_on.clear()
        again = asyncio.create_task(recover(recovery))
        await within(engines.asked.get())
        state = await look(store, "w")
        assert state.serving is not None and not state.excluded, "the first one did not die of itself"
        engines.may_go_on.set()
        await within(again)
    finally:
        await _kill_all(engines, await look(store, "w"))


async def _updated_and(engines: Trained, serves: Awaitable[bool]) -> bool:
    engines.updated.set()
    return await serves


async def _kill_all(engines: RecordedEngineHost, state: WorkerState) -> None:
    for engine in state.engines.values():
        await engines.kill(process_of(engine))


class Startless(RecordedEngineHost):
    """Engines that do not start while `broken`; a shadow's start goes on once it may."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder / "log", owner_pid=os.getpid())
        self.broken = False
        self.starts = 0
        self.arming = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def start(self, incarnation: str, role: Literal["main", "shadow"]) -> EngineProcess:
        self.starts += 1
        if self.broken:
            raise EngineFailedError(incarnation, "did not start (no memory)")
        started = await super().start(incarnation, role)
        if role == "shadow":
            self.arming.set()
            await self.may_go_on.wait()
        return started


def startless(tmp_path: Path) -> Startless:
    recording = TokenRecording("r", [USER, 1, END, ASSISTANT], [[2, END]])
    (tmp_path / "r.recording.json").write_bytes(msgspec.json.encode(recording))
    return Startless(tmp_path)


async def test_a_worker_for_which_no_main_can_be_started_is_excluded(tmp_path: Path) -> None:
    engines, store = startless(tmp_path), MemoryStore()
    recovery = WorkerRecovery(store, engines, host_name(), "actors/elsewhere-1-ab", patience_s=1000.0)
    first = (await recovery.start("w", "run")).serving
    assert first is not None
    engines.broken = True
    engines.starts = 0
    await engines.kill(process_of(first))
    await report_engine_failure(store, "w", first.registered.incarnation, "died", "killed", "test")
    for _ in range(2 * START_TRIES):  # one of them for each notice
        await within(recover(recovery))
    state = await look(store, "w")
    assert engines.starts == START_TRIES
    assert "no main could be started, 3 times in a row" in state.excluded and "no memory" in state.excluded
    assert {engine.status for engine in state.engines.values()} == {"removed"}


@pytest.mark.parametrize("excluded", [True, False])
async def test_a_shadow_that_is_armed_for_a_worker_that_is_gone_is_ended(tmp_path: Path, excluded: bool) -> None:
    engines, store = startless(tmp_path), MemoryStore()
    recovery = WorkerRecovery(store, engines, host_name(), "actors/elsewhere-1-ab")
    main = (await recovery.start("w", "run")).main
    engines.may_go_on.clear()
    arming = asyncio.create_task(recover(recovery))
    await within(engines.arming.wait())
    writer, _ = await take_over(store, ids.worker("w"), "reaper")
    if excluded:
        await writer.append(FailureDetected(main, "gpu", "XID 79", "detector"))
    else:
        await writer.append(WorkerRemoved(main, "run run is over"))
    engines.may_go_on.set()
    await within(arming)
    try:
        assert list((await look(store, "w")).engines) == [main]
        assert sum(child.poll() is None for child in engines._children) <= 1, "the main, which is the reaper's"
    finally:
        await _kill_all(engines, await look(store, "w"))


class Uncertain(MemoryStore):
    """Does not answer to the first append of a handover."""

    lost = 1

    async def append(self, stream: StreamId, entry: Entry, notice_tag: str | None = None) -> None:
        if notice_tag == "handover-completed" and self.lost:
            self.lost -= 1
            raise JournalUnavailableError("here", 0.0, "it is being restarted")
        await super().append(stream, entry, notice_tag)


async def test_what_a_recovery_left_for_later_it_does_not_wait_for(engines: RecordedEngineHost) -> None:
    store = Uncertain()
    recovery = WorkerRecovery(store, engines, host_name(), "actors/elsewhere-1-ab", patience_s=1000.0)
    await recovery.start("w", "run")
    await recover(recovery)
    try:
        main = (await look(store, "w")).engines[(await look(store, "w")).main]
        await engines.kill(process_of(main))
        await report_engine_failure(store, "w", main.registered.incarnation, "died", "killed", "test")
        with pytest.raises(JournalUnavailableError):
            await recover(recovery)
        await within(recover(recovery))
        state = await look(store, "w")
        assert state.handovers == 1 and state.serving is not None
    finally:
        await _kill_all(engines, await look(store, "w"))


async def test_a_clock_that_was_set_back_excludes_no_worker(engines: RecordedEngineHost) -> None:
    store = MemoryStore()
    recovery = WorkerRecovery(store, engines, host_name(), "actors/elsewhere-1-ab", relapse_s=1.0)
    await recovery.start("w", "run")
    await recover(recovery)
    try:
        for time_ns in (2_000_000_000_000_000_000, 1_000_000_000_000_000_000):
            state = await look(store, "w")
            await engines.kill(process_of(state.engines[state.main]))
            writer, _ = await take_over(store, ids.worker("w"), "detector")
            await writer.append(FailureDetected(state.main, "died", "killed", "detector"), time_ns=time_ns)
            await recover(recovery)
        assert not (await look(store, "w")).excluded
    finally:
        await _kill_all(engines, await look(store, "w"))


async def test_an_engine_whose_starter_died_before_the_journal_knew_it_is_ended(
    engines: RecordedEngineHost, tmp_path: Path
) -> None:
    """An actor is killed between the start of a main and its registration, another while it arms a shadow."""
    store = MemoryStore()
    recovery = WorkerRecovery(store, engines, host_name(), "actors/elsewhere-1-ab")
    main = (await recovery.start("w", "run")).serving
    assert main is not None
    script = (
        "import asyncio, os, sys\nfrom pathlib import Path\n"
        "from belayer.gpu.recorded_host import RecordedEngineHost as Host\n"
        "host = Host(Path(sys.argv[1]), Path(sys.argv[1]) / 'log', owner_pid=int(sys.argv[2]))\n"
        "for name, role in (('w-e99', 'main'), ('w-ab12cd', 'shadow'), ('w2-e1', 'main')):\n"
        "    print(asyncio.run(host.start(name, role)).pid, flush=True)\n"
        "os._exit(9)\n"
    )
    actor = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, str(tmp_path), str(os.getpid())), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await within(actor.communicate())
    pids = [int(line) for line in said.split()]
    other = EngineProcess("w2-e1", host_name(), pids[2], start_ticks(pids[2]), "")
    try:
        assert len(pids) == 3 and all(map(start_ticks, pids))
        ours = await engines.start("w-e98", "main")  # its starter lives: it may be in the making
        await recover(recovery)
        assert [bool(start_ticks(pid)) for pid in (*pids, ours.pid)] == [False, False, True, True]
        state = await look(store, "w")
        assert state.serving == main and state.shadow is not None
        await engines.kill(ours)
    finally:
        await engines.kill(other)
        await _kill_all(engines, await look(store, "w"))
