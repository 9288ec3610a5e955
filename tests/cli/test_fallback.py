"""`belayer actors --fallback files` as a process of its own: a container that cannot be captured whole is lost, and its
trajectory goes on with the files."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from belayer.actors.sandboxes import create_sandbox, incarnation_of, look
from belayer.client import Trajectory, wait_resumed
from belayer.journal.redis_store import RedisStore
from belayer.sandbox.docker_host import DockerHost, open_host
from belayer.sandbox.home import default_home
from tests.actors.test_real import SPEC, published, replaced, turn
from tests.cli.command import COMMAND, ROOT, environment
from tests.cli.test_restore import START
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.sandbox


@pytest.fixture
async def host(namespace: str) -> AsyncIterator[DockerHost]:
    async with open_host(spares=0) as opened:
        yield opened
        await opened.remove_run(f"run-{namespace}")


@contextmanager
def actors(redis_url: str, namespace: str, folder: Path, *more: str) -> Iterator[None]:
    """The verb, from its `ready` until SIGTERM."""
    command = [*COMMAND, "actors", "--url", redis_url, "--namespace", namespace, "--engine-log", str(folder)]
    command += ["--recordings", str(folder), "--owner-pid", str(os.getpid()), *more]
    settings = environment(BELAYER_HOME=str(default_home()))
    with subprocess.Popen(command, env=settings, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(DEADLINE_S)


async def test_the_trajectory_goes_on_with_the_files_and_says_what_is_gone(
    redis_store: RedisStore, redis_url: str, namespace: str, host: DockerHost, tmp_path: Path
) -> None:
    store, run, name = redis_store, f"run-{namespace}", f"t-{namespace}"
    with actors(redis_url, namespace, tmp_path, "--fallback", "files"):
        t = await Trajectory.open(store, name)
        await t.start(run, "task", [1])
        box = await create_sandbox(store, host, run, name, SPEC, "test")
        assert box.container is not None
        async with await host.attach(incarnation_of(box.container)) as sandbox:
            await turn(t, sandbox, START)
        await until(lambda: published(store, name, 1), what="a checkpoint of boundary 1")
        os.kill(box.container.pid, signal.SIGKILL)
        await until(lambda: replaced(store, name, box.incarnation), what="another container")
        await until(lambda: lacks(store, name), what="a resumption that says what is gone")
        t = await Trajectory.open(store, name)
        assert t.state.boundary.number == 1
        assert [one.what.split()[0] for one in t.state.left_out] == ["python3", "sleep"]
        assert "io_uring" in t.state.left_out[0].cause
        again = (await look(store, name)).container
        assert again is not None
        async with await host.attach(incarnation_of(again)) as sandbox:
            assert await turn(t, sandbox, "cat file; pgrep -c sleep || true") == "kept\n0\n"
        # Nothing stands in the way any more: this one is whole.
        await until(lambda: published(store, name, 2), what="a checkpoint of boundary 2")
        made = (await look(store, name)).published.values()
        assert {one.boundary: bool(one.left_out) for one in made} == {1: True, 2: False}
        await t.close()


async def lacks(store: RedisStore, name: str) -> bool:
    return bool((await wait_resumed(store, name, DEADLINE_S)).left_out)
