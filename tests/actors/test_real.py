"""The actors at work on a real journal and real containers: a container is killed, and its trajectory goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from belayer import ids
from belayer.actors.sandboxes import create_sandbox, incarnation_epoch, incarnation_of, is_checkpoint_of, look
from belayer.actors.service import run_actors
from belayer.client import Trajectory
from belayer.errors import FencedError, SandboxFailedError
from belayer.gpu.recorded_host import RecordedEngineHost
from belayer.journal.events import CheckpointDiscarded, RunFinished, RunStarted, SandboxSpec
from belayer.journal.redis_store import RedisStore
from belayer.journal.writer import Reader, take_over
from belayer.processes import host_name, start_ticks
from belayer.sandbox.docker_host import DockerHost, open_host
from belayer.sandbox.manifest import PROBE, RUNNER_STATE
from belayer.sandbox.protocol import Action, Sandbox
from tests.sandbox.conftest import change_note
from tests.waiting import until

pytestmark = pytest.mark.sandbox
SPEC = SandboxSpec("belayer-base:bookworm", workdir="/testbed")


@pytest.fixture
async def host(namespace: str) -> AsyncIterator[DockerHost]:
    async with open_host() as opened:
        yield opened
        await opened.remove_run(f"run-{namespace}")


@asynccontextmanager
async def actors(store: RedisStore, host: DockerHost, engines: RecordedEngineHost) -> AsyncIterator[None]:
    ready = asyncio.Event()
    working = asyncio.create_task(run_actors(store, host, engines, host_name(), ready))
    await ready.wait()
    try:
        yield
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def turn(t: Trajectory, sandbox: Sandbox, command: str) -> str:
    """One generation of one token, and the command after it."""
    await t.begin_generation("w", "w-1")
    await t.append_tokens([len(command)], [0.0])
    await t.finish_generation("stop")
    number = await t.start_action(command, 30.0, sandbox.incarnation.name)
    seen = await sandbox.run(Action(number, command, 30.0))
    await t.commit_action(seen.exit_status, list(seen.output), b"", seen.duration_s)
    return seen.output.decode()


async def test_a_killed_container_comes_back_at_its_newest_boundary(
    redis_store: RedisStore, host: DockerHost, namespace: str, tmp_path
) -> None:
    store, run, name = redis_store, f"run-{namespace}", f"t-{namespace}"
    engines = RecordedEngineHost(tmp_path, tmp_path, owner_pid=os.getpid())
    writer, _ = await take_over(store, ids.run(run), "test")
    await writer.append(RunStarted(host_name(), os.getpid(), start_ticks(os.getpid()), "everysec", "test"))
    async with actors(store, host, engines):
        t = await Trajectory.open(store, name)
        await t.start(run, "task", [1])
        box = await create_sandbox(store, host, run, name, SPEC, "test")
        assert box.container is not None
        sandbox = await host.attach(incarnation_of(box.container))
        await turn(t, sandbox, "sleep 1000 & echo one > kept; echo $! > pid")
        await until(lambda: published(store, name, 1), what="a checkpoint of boundary 1")

        os.kill(box.container.pid, signal.SIGKILL)
        with pytest.raises((FencedError, SandboxFailedError)):
            await turn(t, sandbox, "echo two >> kept")
        await sandbox.close()

        t = await Trajectory.open(store, name)
        await until(lambda: replaced(store, name, box.incarnation), what="another container")
        t = await Trajectory.open(store, name)
        again = (await look(store, name)).container
        assert again is not None and again.incarnation == t.state.sandbox_incarnation
        assert t.state.boundary.number == 1
        async with await host.attach(incarnation_of(again)) as sandbox:
            assert await turn(t, sandbox, "cat kept; kill -0 $(cat pid) && echo lives") == "one\nlives\n"
        await t.finish("done")
        await until(lambda: removed(host, name), what="the container's removal")
        await (await take_over(store, ids.run(run), "test"))[0].append(RunFinished("done"))
    state = await look(store, name)
    assert (state.phase, state.failures) == ("removed", 1)
    assert not [c for c in await host.checkpoints() if c.startswith(name)]


@pytest.mark.parametrize(
    ("command", "note", "old", "new", "cause"),
    [
        ("sleep 1000 & ", PROBE, b'"threads":"1"', b'"threads":"7"', "threads of process"),
        ("", RUNNER_STATE, b'{"last": 2', b'["last", 2', "no saved"),
    ],
    ids=["a process is another", "the runner's state is none"],
)
async def test_a_checkpoint_that_does_not_come_back_is_discarded_for_an_older_one(
    redis_store: RedisStore,
    host: DockerHost,
    namespace: str,
    tmp_path: Path,
    command: str,
    note: str,
    old: bytes,
    new: bytes,
    cause: str,
) -> None:
    store, run, name = redis_store, f"run-{namespace}", f"t-{namespace}"
    async with actors(store, host, RecordedEngineHost(tmp_path, tmp_path, owner_pid=os.getpid())):
        t = await Trajectory.open(store, name)
        await t.start(run, "task", [1])
        box = await create_sandbox(store, host, run, name, SPEC, "test")
        assert box.container is not None
        async with await host.attach(incarnation_of(box.container)) as sandbox:
            for number, word in enumerate(("one", "two"), start=1):
                await turn(t, sandbox, f"{command}echo {word} >> kept")
                await until(lambda number=number: published(store, name, number), what=f"a checkpoint of {number}")
            (newest,) = (made for made in (await look(store, name)).published.values() if made.boundary == 2)
            written = host.checkpoint_path(newest.checkpoint) / note
            assert old in written.read_bytes()
            change_note(written, written.read_bytes().replace(old, new))
            os.kill(box.container.pid, signal.SIGKILL)
            with pytest.raises((FencedError, SandboxFailedError)):
                await turn(t, sandbox, "cat kept")
        await until(lambda: replaced(store, name, box.incarnation), what="another container")
        t = await Trajectory.open(store, name)
        assert t.state.boundary.number == 1
        again = (await look(store, name)).container
        assert again is not None
        async with await host.attach(incarnation_of(again)) as sandbox:
            assert await turn(t, sandbox, "cat kept; pgrep -c sleep || true") == f"one\n{1 if command else 0}\n"
        history = [record.event for record in await Reader(store, ids.sandbox(name)).catch_up()]
        (discarded,) = (event for event in history if isinstance(event, CheckpointDiscarded))
        assert discarded.checkpoint == newest.checkpoint
        assert cause in discarded.reason
        await t.finish("done")
        await until(lambda: removed(host, name), what="the container's removal")


async def published(store: RedisStore, name: str, boundary: int) -> bool:
    return any(made.boundary == boundary for made in (await look(store, name)).published.values())


async def replaced(store: RedisStore, name: str, old: str) -> bool:
    state = await look(store, name)
    return state.phase == "live" and state.incarnation != old


async def removed(host: DockerHost, name: str) -> bool:
    """Its containers and checkpoints are gone. A spare of the run may wait for another trajectory."""
    left = [found for found in await host.incarnations() if incarnation_epoch(name, found) >= 0]
    return not left and not any(is_checkpoint_of(name, found) for found in await host.checkpoints())
