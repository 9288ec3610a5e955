"""`belayer checkpoints` and `belayer fork` on a real journal and real containers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from belayer.client import Trajectory
from belayer.journal.redis_store import RedisStore
from belayer.sandbox.docker_host import DockerHost, open_host
from belayer.sandbox.home import default_home
from belayer.sandbox.protocol import Action, Incarnation
from tests.cli.command import assert_one_line_error, belayer
from tests.cli.rollout import begin


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "criu").symlink_to(default_home() / "criu")
    return tmp_path


@pytest.fixture
async def host(home: Path, namespace: str) -> AsyncIterator[DockerHost]:
    async with open_host(home, spares=0) as opened:
        yield opened
        for run in (f"run-{namespace}", f"search-{namespace}"):
            await opened.remove_run(run)


def test_a_host_without_checkpoints(home: Path) -> None:
    done = belayer("checkpoints", BELAYER_HOME=str(home))
    assert (done.returncode, done.stderr) == (0, "")
    assert "no checkpoints on this host" in done.stdout


@pytest.mark.sandbox
async def test_what_is_kept_and_copies_of_it(
    redis_store: RedisStore, redis_url: str, namespace: str, host: DockerHost, home: Path
) -> None:
    run, name = f"run-{namespace}", f"t-{namespace}"

    async def call(*arguments: str, status: int = 0) -> Any:
        journal = ("--url", redis_url, "--namespace", namespace)
        done = await asyncio.to_thread(belayer, *arguments, *journal, "--json", BELAYER_HOME=str(home))
        assert done.returncode == status, done.stderr
        return json.loads(done.stdout)

    box = await begin(redis_store, host, run, name, "head -c 100000 /dev/urandom > file; sleep 1000 & true")
    (checkpoint,) = box.published
    listed = await call("checkpoints")
    (row,) = listed["checkpoints"]
    assert (row["checkpoint"], row["trajectory"], row["action"], row["processes"]) == (checkpoint, name, 1, True)
    assert "what recovery restores" in row["why"]
    assert row["bytes"] == row["alone_bytes"] == listed["logical_bytes"] == listed["disk_bytes"] > 1_000_000
    assert 0 < listed["blobs_bytes"] < listed["disk_bytes"] and listed["unheld_bytes"] == 0

    forked = await call("fork", name, "--n", "2")
    assert (forked["checkpoint"], forked["action"], forked["run"]) == (checkpoint, 1, run)
    sums = set[bytes]()
    for n, copy in enumerate(forked["copies"]):
        here = msgspec.convert({field: copy[field] for field in Incarnation.__dataclass_fields__}, Incarnation)
        async with await host.attach(here) as sandbox:
            sums.add((await sandbox.run(Action(2, "md5sum file; pgrep -c sleep"))).output)
            await sandbox.run(Action(3, f"echo {n} > mine"))
        await host.checkpoint(here, f"copy-{n}", 3)
    assert len(sums) == 1 and sums.pop().endswith(b"\n1\n")
    shared = await call("checkpoints", "--verify")
    assert shared["logical_bytes"] - shared["disk_bytes"] > 2 * 100_000, "file, in all three"
    assert {row["why"] for row in shared["checkpoints"] if row["checkpoint"] != checkpoint} == {
        "this journal does not know it"
    }

    again = await call("fork", checkpoint, "--run", f"search-{namespace}")
    assert (again["run"], len(again["copies"])) == (f"search-{namespace}", 1)
    assert await host.incarnations(f"search-{namespace}") == [again["copies"][0]["name"]]
    unknown = await asyncio.to_thread(
        belayer, "fork", "nobody", "--url", redis_url, "--namespace", namespace, BELAYER_HOME=str(home)
    )
    assert_one_line_error(unknown, "nobody is no trajectory of this journal and no checkpoint on this host")

    (host.checkpoint_path(checkpoint) / "layer/testbed/file").write_bytes(bytes(100_000))
    damaged = await call("checkpoints", "--verify", "--trajectory", name, status=1)
    assert [row["damage"] for row in damaged["checkpoints"]] == ["its layer is damaged"]
    async with await Trajectory.open(redis_store, name) as t:
        await t.abort("enough")
    ended = await call("checkpoints", "--trajectory", name)
    assert "its trajectory has ended" in ended["checkpoints"][0]["why"]
