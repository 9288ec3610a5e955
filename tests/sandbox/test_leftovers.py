"""What a failed or killed restore, or a spare container in the making, could leave behind; and homes in memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from belayer.errors import RestoreFailedError
from belayer.sandbox.docker_host import open_host
from belayer.sandbox.home import default_home
from belayer.sandbox.mounts import unmount_leftovers
from tests.sandbox.conftest import Bench, bench_of, change_image
from tests.waiting import until

pytestmark = pytest.mark.sandbox


def mount_points() -> list[str]:
    return [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]


async def test_a_failed_restore_leaves_nothing_mounted(bench: Bench) -> None:
    live = await bench.create()
    await live.sh("sleep 1000 &")
    checkpoint = await live.checkpoint()
    for image in (bench.host.checkpoint_path(checkpoint) / "images").glob("core-*.img"):
        change_image(image, bytes(image.stat().st_size))
    known = set(mount_points())
    with pytest.raises(RestoreFailedError):
        await bench.restore(checkpoint, 1)
    fresh = {where for where in mount_points() if where not in known and "criu" in where}
    await until(lambda: fresh.isdisjoint(mount_points()), what="other restores' mounts to be gone, the only ones")


def test_mounts_of_a_killed_criu_are_undone_before_their_folder_goes(tmp_path: Path) -> None:
    yard = tmp_path / "restore" / ".criu.cgyard.x" / "deep"
    other = tmp_path / "restore-of-another"
    root = tmp_path / "moby" / "0123" / "criu-root"
    for folder in (yard.parent, other, root):
        folder.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", str(folder)], check=True)
    yard.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(yard)], check=True)
    try:
        unmount_leftovers("0123", tmp_path / "restore")
        assert [where for where in mount_points() if where.startswith(str(tmp_path))] == [str(other)]
        assert not root.parent.exists(), "runc would take it for the container"
    finally:
        subprocess.run(["umount", str(other)], check=True)


async def test_a_spare_in_the_making_goes_with_its_run(home: Path) -> None:
    async with open_host(home, spares=1) as host:
        bench = Bench(host)
        await (await bench.create()).checkpoint()
        await bench.host.remove_run(bench.run)
        await host.spares_settled()
        assert await host.incarnations(bench.run) == []


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A Belayer folder on a tmpfs, as /tmp is on Debian 13."""
    subprocess.run(["mount", "-t", "tmpfs", "none", str(tmp_path)], check=True)
    try:
        (tmp_path / "criu").symlink_to(default_home() / "criu")
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.fixture
async def memory_bench(in_memory: Path) -> AsyncIterator[Bench]:
    async with open_host(in_memory, spares=0) as host, bench_of(host) as made:
        yield made


async def test_belayers_folder_may_lie_in_memory(memory_bench: Bench) -> None:
    live = await memory_bench.create()
    await live.sh("sleep 1000 & echo here > file; echo there > /dev/shm/file")
    back = await live.kill_and_restore(await live.checkpoint())
    assert await back.sh("cat file /dev/shm/file; pgrep -c sleep") == "here\nthere\n1\n"
    again = await back.kill_and_restore(await back.checkpoint())
    assert await again.sh("cat file /dev/shm/file; pgrep -c sleep") == "here\nthere\n1\n"


async def test_a_container_whose_folder_is_gone_can_be_removed(bench: Bench, home: Path) -> None:
    live = await bench.create()
    await live.sandbox.close()
    folder = home / "run" / live.incarnation.name
    await asyncio.to_thread(unmount_leftovers, "", folder)
    await asyncio.to_thread(os.rename, folder, home / "gone")
    await bench.host.remove(live.incarnation.name)
    assert await bench.host.incarnations(bench.run) == []
