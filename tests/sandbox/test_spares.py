"""Spare containers: a quiet checkpoint comes back in one that waits, exactly as in a fresh one."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from belayer.sandbox.docker_host import open_host
from belayer.sandbox.spares import PREFIX
from tests.sandbox.conftest import SPEC, Bench, bench_of
from tests.sandbox.test_full_checkpoint import FILES, LOOK

pytestmark = pytest.mark.sandbox


@pytest.fixture
async def bench(home: Path) -> AsyncIterator[Bench]:
    async with open_host(home, spares=2) as host, bench_of(host) as made:
        yield made


async def spares(bench: Bench) -> list[str]:
    await bench.host.spares_settled()
    return [name for name in await bench.host.incarnations(bench.run) if name.startswith(PREFIX)]


async def test_a_spare_is_taken_and_another_made(bench: Bench) -> None:
    live = await bench.create()
    await live.sh(FILES.replace("; echo in-shm > /dev/shm/note", ""))
    looked = await live.sh(LOOK.replace("cat /dev/shm/note; ", ""))
    assert await spares(bench) == []
    checkpoint = await live.checkpoint()
    (spare,) = await spares(bench)
    back = await live.kill_and_restore(checkpoint)
    assert back.incarnation.container_id != live.incarnation.container_id
    assert await back.sh(LOOK.replace("cat /dev/shm/note; ", "")) == looked
    assert spare not in await spares(bench), "it has its new name"
    assert len(await spares(bench)) == 1, "and another waits"

    await back.sh("echo more > more")
    again = await back.kill_and_restore(await back.checkpoint())
    assert await again.sh("cat more") == "more\n"
    assert await again.sh(LOOK.replace("cat /dev/shm/note; ", "") + "rm more") != looked


async def test_other_kinds_are_left_alone_and_their_number_is_bounded(bench: Bench) -> None:
    lives = []
    for n in range(3):
        lives.append(await bench.create(msgspec.structs.replace(SPEC, environment={"KIND": str(n)})))
        await lives[-1].sh("echo $KIND > kind")
        checkpoint = await lives[-1].checkpoint()
        assert len(await spares(bench)) == min(2, n + 1)
    back = await bench.restore(checkpoint, 1, msgspec.structs.replace(SPEC, environment={"KIND": "2"}))
    assert await back.sh("echo $KIND; cat kind") == "2\n2\n", "no spare of this kind: made afresh"
    await bench.host.remove(lives[0].incarnation.name)
    await lives[1].checkpoint()
    assert len(await spares(bench)) == 1, "one whose kind is gone is of no use"


async def test_a_dead_spare_is_passed_over(bench: Bench) -> None:
    live = await bench.create()
    await live.sh("echo here > file")
    checkpoint = await live.checkpoint()
    (spare,) = await spares(bench)
    await bench.host.remove(spare)
    (bench.host.checkpoint_path("x").parent.parent / "run" / spare).mkdir()
    back = await live.kill_and_restore(checkpoint)
    assert await back.sh("cat file") == "here\n"


async def test_nothing_waits_after_the_run(bench: Bench) -> None:
    live = await bench.create()
    await live.checkpoint()
    await bench.host.remove_run(bench.run)
    assert await spares(bench) == []
    assert await bench.host.incarnations(bench.run) == []


async def test_overlays_own_attributes_do_not_show_in_a_container_that_was_a_spare(bench: Bench) -> None:
    """A folder of the image in which something was changed carries them in the layer."""
    live = await bench.create()
    await live.sh("touch /etc/issue; mkdir /opt/new")
    checkpoint = await live.checkpoint()
    assert len(await spares(bench)) == 1
    back = await live.kill_and_restore(checkpoint)
    root = f"/proc/{back.incarnation.pid}/root"
    assert [os.listxattr(root + path) for path in ("/etc", "/etc/issue", "/opt", "/opt/new", "/tmp")] == [[]] * 5


@pytest.mark.parametrize("count", [0, 1], ids=["in a new container", "in a spare one"])
async def test_the_root_itself_comes_back(home: Path, count: int) -> None:
    async with open_host(home, spares=count) as host, bench_of(host) as bench:
        live = await bench.create()
        look = "python3 -c 'import os; print(os.listxattr(\"/\"))'; stat -c '%a %u %g %Y' /"
        mark = 'python3 -c \'import os; os.setxattr("/", "user.a", b"b")\''
        await live.sh(f"{mark}; chown 1:2 /; chmod 2711 /; touch -d 2001-01-01 /")
        seen = await live.sh(look)
        checkpoint = await live.checkpoint()
        await host.spares_settled()
        back = await live.kill_and_restore(checkpoint)
        assert await back.sh(look) == seen
        await back.sh('python3 -c \'import os; os.removexattr("/", "user.a")\'')
        seen = await back.sh(look)
        checkpoint = await back.checkpoint()
        await host.spares_settled()
        assert await (await back.kill_and_restore(checkpoint)).sh(look) == seen
