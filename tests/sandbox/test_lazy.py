"""Large memories arrive after their processes: all of them, or the container is seen to fail."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from belayer.errors import RestoreFailedError
from belayer.sandbox import lazy
from belayer.sandbox.home import Home
from belayer.sandbox.tree import kill_users_of
from tests.sandbox.conftest import SPEC, Bench, Live
from tests.waiting import DEADLINE_S, until, within

pytestmark = pytest.mark.sandbox

BALLAST = """cat > ballast.py <<'END'
import hashlib, os
memory = bytearray(os.urandom(1 << 20) * 200)
open("digest", "w").write(hashlib.md5(memory).hexdigest())
os.mkfifo("ask")
while open("ask").read():
    open("answer.new", "w").write(hashlib.md5(memory).hexdigest())
    os.rename("answer.new", "answer")
END
python3 ballast.py > /dev/null & until [ -e ask ]; do sleep 0.01; done"""
ASK = "rm -f answer; echo > ask; until [ -e answer ]; do sleep 0.01; done; cmp digest answer"


def work(home: Path, live: Live) -> Path:
    return Home(home).restore_folder(live.incarnation.name)


async def test_all_pages_arrive_and_a_capture_waits_for_them(bench: Bench, home: Path) -> None:
    live = await bench.create()
    await live.sh(BALLAST)
    back = await live.kill_and_restore(await live.checkpoint())
    assert (work(home, back) / "lazy-pid").exists()
    again = await back.kill_and_restore(await back.checkpoint())
    assert "ballast.py" in await again.sh("ps axo args"), "arguments are there from the start"
    assert await again.sh(ASK) == ""
    assert await asyncio.to_thread(lazy.wait, work(home, again), DEADLINE_S)
    assert await again.sh(ASK) == ""


async def test_a_daemon_that_fails_takes_the_container_with_it(bench: Bench, tmp_path: Path) -> None:
    live = await bench.create()
    daemon = tmp_path / "criu"
    daemon.write_text("#!/bin/sh\ntouch $5/lazy-pages.socket\nread -r line < $5/gate\nexit 1\n")
    daemon.chmod(0o755)
    os.mkfifo(tmp_path / "gate")
    await asyncio.to_thread(lazy.start, daemon, tmp_path, tmp_path, live.incarnation.container_id)
    lazy.watch_over(tmp_path, live.incarnation.pid)
    assert not lazy.wait(tmp_path, 0.0), "it is at work"
    assert await live.sh("echo alive") == "alive\n"
    await asyncio.to_thread((tmp_path / "gate").write_text, "fail\n")
    assert "ended" in await within(live.sandbox.wait_dead())
    assert await asyncio.to_thread(lazy.wait, tmp_path, DEADLINE_S)


async def test_a_daemon_is_ended_with_its_container(bench: Bench, tmp_path: Path) -> None:
    live = await bench.create()
    daemon = tmp_path / "criu"
    daemon.write_text("#!/bin/sh\ntouch $5/lazy-pages.socket\nexec sleep 1000\n")
    daemon.chmod(0o755)
    await asyncio.to_thread(lazy.start, daemon, tmp_path, tmp_path, live.incarnation.container_id)
    await asyncio.to_thread(kill_users_of, tmp_path)
    assert await asyncio.to_thread(lazy.wait, tmp_path, DEADLINE_S)
    assert await live.sh("echo alive") == "alive\n"


async def test_small_memories_need_no_daemon(bench: Bench, home: Path) -> None:
    live = await bench.create()
    await live.sh("sleep 1000 &")
    back = await live.kill_and_restore(await live.checkpoint())
    assert not (work(home, back) / "lazy-pid").exists()
    assert await back.sh("pgrep -c sleep") == "1\n"


async def test_a_restore_that_hangs_can_be_removed(bench: Bench, home: Path) -> None:
    """With its daemon stopped before it has brought the runner's own memory, nothing comes of the restore."""
    live = await bench.create()
    await live.sh(BALLAST)
    checkpoint = await live.checkpoint()
    name = bench.name()
    restoring = asyncio.ensure_future(bench.host.restore(bench.run, bench.trajectory, name, SPEC, checkpoint, 1))
    folder = Home(home).restore_folder(name)
    await until((folder / lazy.SOCKET).exists, what="the daemon")
    guard = int((folder / "lazy-pid").read_text())
    for child in Path(f"/proc/{guard}/task/{guard}/children").read_text().split():
        os.kill(int(child), signal.SIGSTOP)
    await until((folder / "restore.log").exists, what="the restore")
    await within(bench.host.remove(name))
    with pytest.raises(RestoreFailedError):
        await restoring
    assert await bench.host.incarnations(bench.run) == [live.incarnation.name]
