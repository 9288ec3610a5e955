"""`belayer restore` on a real journal and a real container."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator

import pytest
import typer
from typer.testing import CliRunner

from belayer.actors.sandboxes import incarnation_of, look
from belayer.cli.restore import restore
from belayer.client import Trajectory
from belayer.errors import InputError, UnknownStreamError
from belayer.journal.redis_store import RedisStore
from belayer.processes import wait_exit
from belayer.sandbox.docker_host import DockerHost, open_host
from belayer.sandbox.protocol import Action
from tests.cli.command import assert_one_line_error, belayer
from tests.cli.rollout import begin

app = typer.Typer()
app.command()(restore)


@pytest.fixture
async def host(namespace: str) -> AsyncIterator[DockerHost]:
    async with open_host() as opened:
        yield opened
        await opened.remove_run(f"run-{namespace}")


def call(url: str, namespace: str, *arguments: str):
    return CliRunner().invoke(app, [*arguments, "--url", url, "--namespace", namespace, "--json"])


def test_an_unknown_trajectory_and_a_missing_journal_are_named(redis_url: str, namespace: str) -> None:
    assert isinstance(call(redis_url, namespace, "nobody").exception, UnknownStreamError)
    nowhere = CliRunner(env={"BELAYER_JOURNAL_URL": ""}).invoke(app, ["nobody"])
    assert isinstance(nowhere.exception, InputError)


@pytest.mark.sandbox
async def test_a_dead_container_is_restored_and_the_cost_is_said_first(
    redis_store: RedisStore, redis_url: str, namespace: str, host: DockerHost
) -> None:
    name = f"t-{namespace}"
    box = await begin(redis_store, host, f"run-{namespace}", name, "echo kept > file")
    assert box.container is not None
    async with await Trajectory.open(redis_store, name) as t:
        await t.begin_generation()
        await t.append_tokens([9, 10, 11], [0.0] * 3)
        await t.finish_generation("stop")
        await t.start_action("sleep 60", 90.0, box.incarnation)

    alive = json.loads((await asyncio.to_thread(call, redis_url, namespace, name)).stdout)
    assert (alive["restored"], alive["boundary"]) == (False, 1)
    assert "--force" in alive["why"]

    os.kill(box.container.pid, signal.SIGKILL)
    await wait_exit(box.container.pid, box.container.pid_start_ticks)
    planned = json.loads((await asyncio.to_thread(call, redis_url, namespace, name, "--dry-run")).stdout)
    assert (planned["restored"], planned["actions_again"], planned["tokens_again"]) == (False, 0, 3)
    done = json.loads((await asyncio.to_thread(call, redis_url, namespace, name)).stdout)
    assert done["restored"] and done["incarnation"] != box.incarnation
    now = await look(redis_store, name)
    assert now.container is not None
    async with await host.attach(incarnation_of(now.container)) as sandbox:
        assert (await sandbox.run(Action(2, "cat file"))).output == b"kept\n"


URING = "import ctypes; ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(256)); open('up', 'w'); input()"
"""Has an io_uring, which CRIU cannot dump, for as long as its standard input is open."""
START = (
    f'mkfifo in; sleep 1000 > in & python3 -c "{URING}" < in & until [ -e up ]; do sleep 0.01; done; echo kept > file'
)


@pytest.mark.sandbox
async def test_without_the_fallback_a_process_that_cannot_be_captured_means_no_checkpoint(
    redis_store: RedisStore, namespace: str, host: DockerHost
) -> None:
    box = await begin(redis_store, host, f"run-{namespace}", f"t-{namespace}", START)
    assert (box.published, box.refused) == ({}, 1)


@pytest.mark.sandbox
async def test_with_it_the_files_come_back_and_every_verb_says_what_does_not(
    redis_store: RedisStore, redis_url: str, namespace: str, host: DockerHost
) -> None:
    name = f"t-{namespace}"
    async with open_host(spares=0, or_files_only=True) as fallback:
        box = await begin(redis_store, fallback, f"run-{namespace}", name, START)
    assert box.container is not None

    async def said(*arguments: str) -> str:
        done = await asyncio.to_thread(belayer, *arguments, *journal, COLUMNS="200")
        assert done.returncode == 0, done
        return done.stdout

    journal = ("--url", redis_url, "--namespace", namespace)
    forked = json.loads(await said("fork", name, "--json"))
    assert "not in them, for the checkpoint holds files alone: python3 -c" in await said("fork", name)
    refused = await asyncio.to_thread(belayer, "fork", name, "--whole", *journal)
    assert_one_line_error(refused, "files alone, without python3 -c", "--whole")

    os.kill(box.container.pid, signal.SIGKILL)
    await wait_exit(box.container.pid, box.container.pid_start_ticks)
    done = json.loads((await asyncio.to_thread(call, redis_url, namespace, name)).stdout)
    assert done["restored"] and done["boundary"] == 1
    assert done["left_out"] == forked["left_out"]
    assert "io_uring" in done["left_out"][0]["cause"] and done["left_out"][0]["what"].startswith("python3 -c")
    assert [one["what"] for one in done["left_out"][1:]] == ["sleep 1000"]
    t = await Trajectory.open(redis_store, name)
    assert [one.what for one in t.state.left_out] == [one["what"] for one in done["left_out"]]
    now = await look(redis_store, name)
    assert now.container is not None
    async with await host.attach(incarnation_of(now.container)) as sandbox:
        assert (await sandbox.run(Action(2, "cat file; pgrep -c sleep || true"))).output == b"kept\n0\n"

    assert "files alone, without python3 -c" in " ".join((await said("checkpoints", "--trajectory", name)).split())
    (row,) = json.loads(await said("status", "--json"))["trajectories"]
    assert row["checkpoint_left_out"] == row["sandbox_left_out"] == [one["what"] for one in done["left_out"]]
    assert "without python3 -c" in await said("timeline", name)
    events = [json.loads(line) for line in (await said("tail", f"sandbox/{name}", "--json")).splitlines()]
    restored = next(event for event in events if event["tag"] == "sandbox-restored")
    assert restored["left_out"] == done["left_out"]
    assert json.loads(await said("audit", "--json"))["findings"] == []
