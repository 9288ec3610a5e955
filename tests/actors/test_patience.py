"""Waiting for another's work: until it is done, until he is dead, and not for ever."""

import asyncio
import subprocess
from collections.abc import Iterator

import pytest

from belayer import ids
from belayer.actors.names import is_surely_dead
from belayer.actors.patience import settled
from belayer.actors.sandboxes import create_sandbox, look
from belayer.journal.events import CheckpointDiscarded, CheckpointStarted, SandboxSpec
from belayer.journal.memory_store import MemoryStore
from belayer.journal.writer import StreamWriter, take_over
from belayer.projections.sandbox import SandboxState
from tests.actors.model import ModelHost
from tests.waiting import within

NAME = "t"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(["sleep", "1000"])
    try:
        yield started
    finally:
        started.kill()
        started.wait()


async def capturing(store: MemoryStore, writer: str) -> StreamWriter:
    """A checkpoint that `writer` has begun."""
    box = await create_sandbox(store, ModelHost(), "run", NAME, SandboxSpec("image"), "rollout")
    held, _ = await take_over(store, ids.sandbox(NAME), writer)
    await held.append(CheckpointStarted("t-b0-e2", box.incarnation, 0, 0))
    return held


def waiting(store: MemoryStore, patience_s: float) -> asyncio.Task[SandboxState]:
    def begun_in(state: SandboxState) -> int | None:
        return state.capture_epoch if state.open_checkpoint is not None else None

    stream = ids.sandbox(NAME)
    return asyncio.create_task(settled(store, stream, lambda: look(store, NAME), begun_in, "host", patience_s))


async def test_who_dies_while_he_is_waited_for_is_not_waited_for_any_longer(process: subprocess.Popen[bytes]) -> None:
    store = MemoryStore()
    await capturing(store, f"actors/host-{process.pid}-abc")
    wait = waiting(store, 1000.0)
    done, _ = await asyncio.wait({wait}, timeout=0.2)
    assert not done
    process.kill()
    state = await within(wait)
    assert state.open_checkpoint is not None and is_surely_dead(state.writer, "host")


async def test_work_that_ends_is_waited_for(process: subprocess.Popen[bytes]) -> None:
    store = MemoryStore()
    writer = await capturing(store, f"actors/host-{process.pid}-abc")
    wait = waiting(store, 1000.0)
    await writer.append(CheckpointDiscarded("t-b0-e2", "it has moved on"))
    assert (await within(wait)).open_checkpoint is None


async def test_somebody_on_another_host_gets_his_time() -> None:
    store = MemoryStore()
    await capturing(store, "actors/elsewhere-1-abc")
    state = await within(waiting(store, 0.05))
    assert state.open_checkpoint is not None
