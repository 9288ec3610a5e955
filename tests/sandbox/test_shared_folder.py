"""The folder that a container shares with its host is bounded, wherever the container came from, and goes with it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import pytest

from belayer.errors import SandboxFailedError
from belayer.processes import wait_exit
from belayer.sandbox.control import SHARED_BYTES
from belayer.sandbox.docker_host import DockerHost, open_host
from belayer.sandbox.docker_sandbox import DockerSandbox
from belayer.sandbox.fork import fork
from belayer.sandbox.home import Home
from belayer.sandbox.mounts import mount_bounded, mounted
from belayer.sandbox.owner import Owner
from belayer.sandbox.protocol import Action
from tests.sandbox.conftest import SPEC, Bench, Live, bench_of

pytestmark = pytest.mark.sandbox
SHARED = "/.belayer/control"
FILL = f"df --output=size,itotal -B1 {SHARED} | tail -1; fallocate -l 1G {SHARED}/x 2>&1"
"""A tmpfs says at once that so much does not fit, and nothing is written."""


def mounts_of(name: str) -> list[str]:
    return [mount.where for mount in mounted("self") if f"/run/{name}/" in mount.where]


async def assert_bounded(live: Live) -> None:
    size, inodes, *said = (await live.sh(FILL, status=1)).split()
    assert (int(size), int(inodes)) == (SHARED_BYTES, 4096)
    assert "No space left" in " ".join(said)
    assert "denied" in await live.sh(f"cp /bin/true {SHARED}/run; {SHARED}/run", status=126)


async def test_a_container_cannot_fill_the_disk_wherever_it_came_from(home: Path) -> None:
    async with open_host(home, spares=1) as host, bench_of(host) as bench:
        live = await bench.create()
        await assert_bounded(live)
        quiet = await live.checkpoint()
        await host.spares_settled()
        await assert_bounded(await bench.restore(quiet, live.number))  # a spare
        await live.sh("sleep 1000 &")
        busy = await live.checkpoint()
        held, name = live.number, live.incarnation.name
        back = await live.kill_and_restore(busy)
        assert mounts_of(name) == [] and not (home / "run" / name).exists()
        await assert_bounded(back)
        again = await back.kill_and_restore(await back.checkpoint())
        assert await again.sh("pgrep -c sleep") == "1\n"
        (copy,) = (await fork(host, bench.run, busy, held, SPEC, {f"{bench.run}-c": bench.name()})).values()
        await assert_bounded(Live(bench, await host.attach(copy), held))
    assert not [mount.where for mount in mounted("self") if f"/run/{bench.run}" in mount.where]


async def test_one_that_fills_it_fails_alone(bench: Bench, home: Path) -> None:
    live, other = await bench.create(), await bench.create()
    checkpoint = await live.checkpoint()
    async with DockerSandbox(Home(home), live.incarnation, answer_s=1.0) as sandbox:
        with pytest.raises(SandboxFailedError, match="did not answer"):
            await sandbox.run(Action(1, f"cd {SHARED}; seq 5000 | xargs touch", timeout_s=20.0))
    assert await other.sh("echo fine") == "fine\n"
    back = await live.kill_and_restore(checkpoint, 0)
    assert await back.sh("echo fine") == "fine\n"


async def test_after_a_machine_restart_nothing_is_mounted_and_all_goes_on(bench: Bench) -> None:
    live = await bench.create()
    await live.sh("echo kept > file")
    checkpoint = await live.checkpoint()
    os.kill(live.incarnation.pid, signal.SIGKILL)
    await wait_exit(live.incarnation.pid, live.incarnation.pid_start_ticks)
    await live.sandbox.close()
    (shared,) = mounts_of(live.incarnation.name)
    await asyncio.to_thread(subprocess.run, ["umount", shared], check=True)
    back = await live.kill_and_restore(checkpoint)
    assert await back.sh("cat file") == "kept\n"


async def test_what_a_maker_that_died_has_mounted_goes_too(host: DockerHost, home: Path) -> None:
    made = Home(home)
    made.make_run_folder("half-made", Owner("run", "t", SPEC, "sha256:0"))
    mount_bounded(made.control_folder("half-made").parent, SHARED_BYTES)
    assert len(mounts_of("half-made")) == 1 and "half-made" in await host.incarnations()
    await host.remove("half-made")
    assert mounts_of("half-made") == [] and not made.run_folder("half-made").exists()


async def test_a_home_behind_a_link(home: Path, tmp_path: Path) -> None:
    (tmp_path / "home").symlink_to(home)
    async with open_host(tmp_path / "home", spares=0) as host, bench_of(host) as bench:
        name = (await bench.create()).incarnation.name
        assert len(mounts_of(name)) == 1
        await host.remove(name)
        assert mounts_of(name) == []
