"""A process that cannot be captured, and a host that then captures the files alone: they are the boundary's, exactly,
and everything that says what a checkpoint is names what is not in it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from belayer.errors import CheckpointRefusedError
from belayer.journal.events import LeftOut, SandboxSpec
from belayer.sandbox.docker_host import open_host
from belayer.sandbox.files_only import NAMED
from belayer.sandbox.manifest import read_manifest
from belayer.sandbox.protocol import CheckpointReport
from belayer.sandbox.tree import described
from tests.sandbox.conftest import IMAGE, Bench, Live, bench_of
from tests.sandbox.test_interrupted import freezer
from tests.sandbox.test_traps import REFUSED, start
from tests.waiting import until

pytestmark = pytest.mark.sandbox


@pytest.fixture
async def files(home: Path) -> AsyncIterator[Bench]:
    """A bench of a host that captures the files alone rather than nothing."""
    async with open_host(home, spares=0, or_files_only=True) as host, bench_of(host) as made:
        yield made


async def captured(live: Live, since: str = "", hold: bool = False) -> tuple[str, CheckpointReport]:
    name = live.bench.name()
    return name, await live.bench.host.checkpoint(live.incarnation, name, live.number, since, hold)


WRITER = """
libc.syscall(425, 8, ctypes.create_string_buffer(256)); n = 0
while not asked.is_set():
    n += 1; open('count', 'w').write(str(n)); open('writer.up', 'w').close()
"""
"""Writes all the time: where it stands when it is frozen is in the checkpoint, and nothing later."""


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("name", REFUSED)
async def test_the_files_come_back_and_the_processes_are_named(files: Bench, name: str, hold: bool) -> None:
    script, cause = REFUSED[name]
    live = await files.create()
    await start(live, name, script)
    await live.sh("echo one > kept; mkdir -p deep; ln -s ../kept deep/link; rm -f /etc/motd; chmod 4755 kept")
    checkpoint, report = await captured(live, hold=hold)
    first = report.left_out[0]
    assert re.search(cause, first.cause)
    named = [one for one in report.left_out if one.pid]
    assert named and all(one.what.startswith(f"python3 {name}.py") for one in named)
    assert read_manifest(files.host.checkpoint_path(checkpoint)).left_out == report.left_out
    at_the_boundary = "ls -lR --time-style=full-iso /testbed; cat kept; ls /etc/motd 2>&1; true"
    expected = await live.sh(at_the_boundary)
    await live.sh("echo later > kept; touch later")
    back = await live.kill_and_restore(checkpoint, live.number - 2)
    assert await back.sh(at_the_boundary) == expected
    assert await back.sh(f"pgrep -fc '^python3 {name}' || true; ls /dev/mqueue") == "0\n"
    # The container as it is now has nothing that cannot be captured.
    assert (await captured(back, since=checkpoint))[1].left_out == ()
    assert (await captured(back, since=checkpoint))[1].held_by == ""


async def test_what_a_process_writes_ends_with_the_freeze(files: Bench) -> None:
    live = await files.create()
    await start(live, "writer", WRITER)
    await live.sh("sleep 1000 & true")
    checkpoint, report = await captured(live)
    assert {one.what.split()[0] for one in report.left_out} == {"python3", "sleep"}
    layer = files.host.checkpoint_path(checkpoint) / "layer/testbed"
    then = (layer / "count").read_text()
    back = await live.kill_and_restore(checkpoint)
    assert await back.sh("cat count; pgrep -c sleep || true") == f"{then}0\n"


async def test_a_process_of_docker_exec_is_left_out_too(files: Bench) -> None:
    live = await files.create()
    await live.sh("echo kept > file")
    process = await asyncio.create_subprocess_exec("docker", "exec", live.incarnation.name, "sleep", "1000")
    await until(lambda: "sleep 1000" in running(live), what="the process of docker exec")
    checkpoint, report = await captured(live)
    (one,) = report.left_out
    assert one.what == "sleep 1000" and one.pid > 1 and "docker exec" in one.cause
    await live.sandbox.close()
    back = await live.kill_and_restore(checkpoint)
    assert await process.wait() != 0
    assert await back.sh("cat file") == "kept\n"


def running(live: Live) -> str:
    return str([*map(described, freezer(live.incarnation).processes())])


async def test_memory_that_processes_share_is_named_and_many_are_counted(files: Bench) -> None:
    live = await files.create()
    await start(live, "io-uring", REFUSED["io-uring"][0])
    await live.sh("echo x > /dev/shm/mine; for i in $(seq 30); do sleep 1000 & done")
    _, report = await captured(live)
    assert len(report.left_out) == NAMED
    assert report.left_out[-1] == LeftOut(0, f"{1 + 30 + 1 - NAMED + 1} more", "")
    await live.sh("pkill -f '^sleep'")
    await until(lambda: "sleep" not in running(live), what="the end of the others")
    _, report = await captured(live)
    assert [(one.what, bool(one.cause)) for one in report.left_out] == [
        ("python3 io-uring.py io-uring", True),
        ("/dev/shm/mine", False),
    ]


async def test_files_in_memory_are_never_left_out(files: Bench) -> None:
    live = await files.create(SandboxSpec(IMAGE, workdir="/testbed", tmpfs=("/tmp",)))
    await start(live, "io-uring", REFUSED["io-uring"][0])
    assert (await captured(live))[1].left_out
    await live.sh("echo work > /tmp/file")
    with pytest.raises(CheckpointRefusedError, match=r"io_uring.*would not hold: /tmp") as refusal:
        await captured(live)
    assert "io-uring.py" in refusal.value.process
    await live.sh("rm /tmp/file; prlimit --pid 1 --nofile=100:100")
    with pytest.raises(CheckpointRefusedError, match="would not hold: changed"):
        await captured(live)


async def test_with_nothing_in_the_way_everything_is_captured(files: Bench) -> None:
    live = await files.create()
    await live.sh("sleep 1000 & echo kept > file")
    checkpoint, report = await captured(live)
    assert report.left_out == ()
    back = await live.kill_and_restore(checkpoint)
    assert await back.sh("pgrep -c sleep; cat file") == "1\nkept\n"
