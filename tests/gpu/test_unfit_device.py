"""A device that reports errors under a main that runs: the journal says so, the worker is excluded, its engines end."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from belayer import ids
from belayer.actors.actor import Actor, run_actor
from belayer.actors.detector import Detector
from belayer.actors.recovery import Recovery
from belayer.actors.sandbox_recovery import SandboxRecovery
from belayer.actors.worker_recovery import WorkerRecovery, look
from belayer.gpu.memory_server import MemoryServer
from belayer.gpu.sglang_host import SglangHost
from belayer.journal.events import FailureDetected, WorkerReady, WorkerRegistered, WorkerRemoved
from belayer.journal.memory_store import MemoryStore
from belayer.journal.writer import Reader, take_over
from belayer.processes import host_name, start_ticks
from tests.actors.model import ModelHost
from tests.gpu.test_memory_server import Child, a_main
from tests.waiting import DEADLINE_S, until, within

ADDRESS = "http://127.0.0.1:9"


class Health:
    """What NVML would say; `asked`: how often it was."""

    def __init__(self) -> None:
        self.evidence: list[str] = []
        self.asked = 0

    def __call__(self) -> str:
        self.asked += 1
        return self.evidence.pop(0) if len(self.evidence) > 1 else self.evidence[0] if self.evidence else ""


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[tuple[Path, Health, Child]]:
    """A memory server of this process with a health of ours, and a process that holds its memory."""
    health, socket, ready, child = Health(), tmp_path / "memory.sock", threading.Event(), Child()
    server = MemoryServer("cpu", socket, health=health)
    thread = threading.Thread(target=server.serve, args=(ready.set,))
    thread.start()
    try:
        assert ready.wait(DEADLINE_S)
        await asyncio.to_thread(a_main, socket, lambda: child, "w-e1")
        yield socket, health, child
    finally:
        child.close()
        server.stop()
        thread.join(DEADLINE_S)


async def test_an_error_under_a_running_main_excludes_its_worker(site: tuple[Path, Health, Child]) -> None:
    socket, health, child = site
    host = SglangHost(socket, [], socket.parent / "logs", owner_pid=os.getpid())
    store, here = MemoryStore(), host_name()
    actors: list[Actor] = [
        Detector(store, host, here, "detector"),
        Recovery(SandboxRecovery(store, ModelHost(), here, "r"), WorkerRecovery(store, host, here, "recovery")),
    ]
    writer, _ = await take_over(store, ids.worker("w"), "test")
    shadow = Child()  # so that nobody starts one
    registered = [
        WorkerRegistered("w-e1", "main", here, child.process.pid, start_ticks(child.process.pid), ADDRESS, "run"),
        WorkerRegistered("w-s", "shadow", here, shadow.process.pid, start_ticks(shadow.process.pid), ADDRESS, "run"),
    ]
    for event in registered:
        await writer.append(event, WorkerReady(event.incarnation, 0))
    running = [asyncio.create_task(run_actor(store, actor, here, "c1")) for actor in actors]
    try:
        asked = health.asked
        await until(lambda: health.asked > asked + 2, what="a look at the health without anybody's request")
        assert (await look(store, "w")).serving is not None
        health.evidence = ["XID 79"]
        await until(lambda: child.process.poll() is not None, what="the end of the main")
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        shadow.close()
    state = await look(store, "w")
    assert state.serving is None and state.excluded == "XID 79"
    events = [recorded.event for recorded in await Reader(store, ids.worker("w")).catch_up()]
    assert FailureDetected("w-e1", "gpu", "XID 79", "detector") in events
    assert {event.incarnation for event in events if isinstance(event, WorkerRemoved)} == {"w-e1", "w-s"}


async def test_who_begins_to_watch_later_is_told_and_one_silence_alone_is_no_evidence(
    site: tuple[Path, Health, Child],
) -> None:
    socket, health, child = site
    host = SglangHost(socket, [], socket.parent / "logs", owner_pid=os.getpid())
    health.evidence = ["NVML has not answered for 11.0 s", ""]
    asked = health.asked
    await until(lambda: health.asked > asked + 2, what="looks at the health")
    assert (await host.status()).unhealthy == ""
    health.evidence = ["1 new uncorrected ECC errors"]

    async def unhealthy() -> bool:
        return (await host.status()).unhealthy != ""

    await until(unhealthy, what="the evidence in the server's status")
    events = host.events()
    event = await within(anext(events))
    await events.aclose()
    assert (event.kind, event.incarnation) == ("unfit", "w-e1") and "ECC" in event.evidence
    assert child.process.poll() is None, "it is not the memory server that ends it"
