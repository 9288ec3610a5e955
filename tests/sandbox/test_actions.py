"""Actions in real containers, and what is left of containers that fail."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from belayer.errors import HostUnfitError, InputError, SandboxFailedError
from belayer.journal.events import SandboxSpec
from belayer.processes import is_alive
from belayer.sandbox.docker_host import DockerHost
from belayer.sandbox.docker_sandbox import DockerSandbox
from belayer.sandbox.home import Home
from belayer.sandbox.protocol import Action
from tests.sandbox.conftest import IMAGE, SPEC, Bench
from tests.waiting import until, within

pytestmark = pytest.mark.sandbox


async def test_the_spec_is_what_the_action_sees(bench: Bench) -> None:
    spec = SandboxSpec(
        IMAGE,
        workdir="/srv",
        environment={"GREETING": "good day"},
        setup=("echo prepared > /srv/ready", "sleep 1000 &"),
        memory_bytes=256 << 20,
        cpus=1.5,
    )
    live = await bench.create(spec)
    seen = await live.sh("pwd; echo $GREETING; cat ready; hostname; pgrep -c sleep; ls /sys/class/net")
    assert seen.split("\n") == ["/srv", "good day", "prepared", "sandbox", "1", "lo", ""]
    limit = await live.sh(
        "cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null || true"
    )
    assert limit.split() == [str(256 << 20)]


async def test_timeouts_statuses_and_orphans(bench: Bench) -> None:
    live = await bench.create()
    assert await live.sh("echo out; echo err >&2; exit 7", status=7) == "out\nerr\n"
    seen = await live.sandbox.run(Action(2, "sleep 100", timeout_s=0.3))
    assert (seen.exit_status, seen.timed_out) == (124, True)
    seen = await live.sandbox.run(Action(3, "head -c 3000000 /dev/zero", output_limit_bytes=1000))
    assert (len(seen.output), seen.dropped_bytes) == (1000, 3000000 - 1000)
    live.number = 3
    await live.sh("for i in 1 2 3; do (setsid sh -c 'exit 0' &); done; (setsid nohup sleep 500 &)")
    pid = live.incarnation.pid
    await until(lambda: children(pid) == ["sleep"], what="all orphans but the living one to be reaped")


def children(pid: int) -> list[str]:
    """Names of the process's children, zombies among them."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    names = []
    for child in found:
        with suppress(FileNotFoundError, ProcessLookupError):  # reaped meanwhile
            names.append(Path(f"/proc/{child}/comm").read_text().strip())
    return names


async def test_a_container_killed_in_an_action_is_a_failure_at_once(bench: Bench) -> None:
    live = await bench.create()
    asked = asyncio.ensure_future(live.sandbox.run(Action(1, "touch begun; sleep 1000", timeout_s=1000.0)))
    begun = Path(f"/proc/{live.incarnation.pid}/root/testbed/begun")
    await until(begun.exists)
    dead = asyncio.ensure_future(live.sandbox.wait_dead())
    os.kill(live.incarnation.pid, signal.SIGKILL)
    with pytest.raises(SandboxFailedError, match="process 1 of the container"):
        await within(asked)
    assert "ended" in await within(dead)
    assert not await bench.host.is_alive(live.incarnation)
    with pytest.raises(SandboxFailedError):
        await bench.host.attach(live.incarnation)
    with pytest.raises(SandboxFailedError):
        await live.sandbox.run(Action(2, "true"))


async def test_a_silent_runner_is_a_failure(bench: Bench, home: Path) -> None:
    live = await bench.create()
    os.kill(live.incarnation.pid, signal.SIGSTOP)
    async with DockerSandbox(Home(home), live.incarnation, answer_s=0.2) as impatient:
        with pytest.raises(SandboxFailedError, match="did not answer"):
            await impatient.run(Action(1, "true", timeout_s=0.1))
    os.kill(live.incarnation.pid, signal.SIGCONT)


async def test_a_second_client_gets_the_recorded_result(bench: Bench) -> None:
    live = await bench.create()
    first = await live.sandbox.run(Action(1, "echo x >> runs; cat runs"))
    async with await bench.host.attach(live.incarnation) as other:
        assert await other.run(Action(1, "echo x >> runs; cat runs")) == first
    assert await other_count(bench, live.incarnation.name) == 1


async def other_count(bench: Bench, name: str) -> int:
    return (await bench.host.incarnations(bench.run)).count(name)


async def test_a_failing_set_up_leaves_nothing(bench: Bench) -> None:
    with pytest.raises(InputError, match="ended with 9: broken"):
        await bench.create(SandboxSpec(IMAGE, setup=("echo broken; exit 9",)))
    assert await bench.host.incarnations(bench.run) == []


async def test_a_missing_image_is_said(bench: Bench) -> None:
    with pytest.raises(HostUnfitError, match="no-such-image is not on this machine"):
        await bench.create(SandboxSpec("no-such-image"))
    assert await bench.host.incarnations(bench.run) == []


async def test_making_it_again_replaces_it_and_removing_twice_is_fine(bench: Bench) -> None:
    live = await bench.create()
    again = await bench.host.create(bench.run, bench.trajectory, live.incarnation.name, SPEC)
    assert again.container_id != live.incarnation.container_id
    assert not is_alive(live.incarnation.pid, live.incarnation.pid_start_ticks)
    assert await bench.host.incarnations(bench.run) == [again.name]
    await asyncio.gather(bench.host.remove(again.name), bench.host.remove(again.name))
    await bench.host.remove(again.name)
    assert await bench.host.incarnations(bench.run) == []


async def test_many_at_once(bench: Bench) -> None:
    lives = await asyncio.gather(*(bench.create() for _ in range(4)))
    seen = await asyncio.gather(*(live.sh(f"echo {i}") for i, live in enumerate(lives)))
    assert seen == ["0\n", "1\n", "2\n", "3\n"]


async def test_a_machine_without_criu_is_unfit(tmp_path: Path) -> None:
    host = DockerHost(tmp_path)
    with pytest.raises(HostUnfitError, match="CRIU"):
        host.check()
    (tmp_path / "criu").mkdir()
    (tmp_path / "criu" / "criu").write_text("#!/bin/sh\necho Version: 3.17.1\n")
    (tmp_path / "criu" / "criu").chmod(0o755)
    with pytest.raises(HostUnfitError, match=r"3\.17 is too old"):
        host.check()
    await host.close()


async def test_a_machine_without_docker_is_unfit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    host = DockerHost(tmp_path)
    with pytest.raises(HostUnfitError, match="no daemon answers"):
        host.check()
