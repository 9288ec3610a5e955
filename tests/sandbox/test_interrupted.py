"""full_checkpoint refused, cancelled, or killed at any point: the container goes on, and nothing half made is seen."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from belayer.errors import CheckpointFailedError, CheckpointRefusedError, SandboxFailedError
from belayer.sandbox import at_boundary
from belayer.sandbox import capture as capture_module
from belayer.sandbox.docker_host import open_host
from belayer.sandbox.freezer import Freezer, freezer_of
from belayer.sandbox.limits import Limits
from belayer.sandbox.protocol import Action, CheckpointReport, Incarnation
from belayer.sandbox.tree import described
from tests.sandbox.conftest import Bench, Live
from tests.waiting import DEADLINE_S, until, within

pytestmark = pytest.mark.sandbox
BALLAST = """
python3 -c "import signal; x = bytearray(b'x') * {size}; open('/tmp/up', 'w'); signal.pause()" &
until [ -e /tmp/up ]; do :; done
"""
CHECKPOINTER = """
import asyncio, sys
from pathlib import Path
from belayer.sandbox.docker_host import DockerHost
from belayer.sandbox.protocol import Incarnation
home, name, *fields = sys.argv[1:]
incarnation = Incarnation(*fields[:4], int(fields[4]), int(fields[5]))
asyncio.run(DockerHost(Path(home)).checkpoint(incarnation, name, int(fields[6])))
"""


async def nothing_is_left(bench: Bench, live: Live, name: str) -> None:
    """No trace of the checkpoint, and the container works."""
    assert not freezer(live.incarnation).freezing
    assert await live.sh("echo fine") == "fine\n"
    assert name not in await bench.host.checkpoints()
    folder = bench.host.checkpoint_path(name).parent
    assert [entry.name for entry in folder.iterdir() if name in entry.name] == []


async def ballasted(bench: Bench, size_bytes: int) -> Live:
    """A container with so much memory."""
    live = await bench.create()
    await live.sh(BALLAST.format(size=size_bytes))
    return live


async def capturing(bench: Bench) -> tuple[Live, str, asyncio.Future[CheckpointReport]]:
    """A container that is held by a checkpoint which is being made; its name."""
    live = await ballasted(bench, 200_000_000)
    while True:
        name = bench.name()
        working = asyncio.ensure_future(bench.host.checkpoint(live.incarnation, name, 1))
        await until(lambda working=working: held(live.incarnation) or working.done(), what="held")
        if not working.done():
            return live, name, working
        await working  # it was done before we were given a turn to see it


def freezer(incarnation: Incarnation) -> Freezer:
    found = freezer_of(incarnation.pid)
    assert found is not None
    return found


async def test_refused_while_a_docker_exec_lives(bench: Bench) -> None:
    live = await bench.create()
    await live.sh("true")
    process = await asyncio.create_subprocess_exec("docker", "exec", live.incarnation.name, "sleep", "1000")
    await until(lambda: "sleep 1000" in str([*map(described, freezer(live.incarnation).processes())]))
    name = bench.name()
    with pytest.raises(CheckpointRefusedError, match="docker exec") as refusal:
        await bench.host.checkpoint(live.incarnation, name, 1)
    assert "sleep 1000" in refusal.value.process
    await nothing_is_left(bench, live, name)
    await live.sh("pkill sleep")
    await process.wait()
    await until(lambda: len(freezer(live.incarnation).processes()) == 1)
    await live.checkpoint()


async def test_refused_when_the_runner_has_moved_on_or_is_busy(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    live = await bench.create()
    await live.sh("mkfifo gate")
    await live.sh("true")
    for action in (1, 3):
        with pytest.raises(CheckpointRefusedError, match=f"not after {action}"):
            await bench.host.checkpoint(live.incarnation, "never", action)
    asked = asyncio.ensure_future(live.sandbox.run(Action(3, "touch begun; read line < gate")))
    root = Path(f"/proc/{live.incarnation.pid}/root/testbed")
    await until((root / "begun").exists)
    monkeypatch.setattr(at_boundary, "SETTLE_S", 0.5)
    for action in (2, 3):
        with pytest.raises(CheckpointRefusedError, match="busy with action 3"):
            await bench.host.checkpoint(live.incarnation, "never", action)
    await asyncio.to_thread((root / "gate").write_text, "go\n")
    await asked
    monkeypatch.undo()
    live.number = 3
    await live.checkpoint()


async def test_a_dead_container_cannot_be_captured(bench: Bench) -> None:
    live = await bench.create()
    os.kill(live.incarnation.pid, signal.SIGKILL)
    await live.sandbox.wait_dead()
    with pytest.raises(SandboxFailedError):
        await bench.host.checkpoint(live.incarnation, "never", 0)


async def test_two_at_once_do_not_meet(bench: Bench, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "LOCK_S", DEADLINE_S)
    live = await bench.create()
    await live.sh("true")
    async with open_host(home) as other:
        reports = await asyncio.gather(
            bench.host.checkpoint(live.incarnation, bench.name(), 1),
            other.checkpoint(live.incarnation, bench.name(), 1),
        )
    assert all(report.frozen_s > 0 for report in reports)
    assert await live.sh("echo fine") == "fine\n"


async def test_cancelled_it_gives_up(bench: Bench) -> None:
    live, name, working = await capturing(bench)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    await nothing_is_left(bench, live, name)
    await live.sh("pgrep -f '[b]ytearray'")


async def test_killed_in_the_middle_the_next_action_thaws(bench: Bench, home: Path) -> None:
    live = await ballasted(bench, 200_000_000)
    name = await killed_checkpointer(bench, home, live)
    assert await live.sh("echo fine") == "fine\n", "whoever waits for a frozen container thaws it"
    await until(lambda: no_leftovers(bench, name), what="the leftovers to be removed")
    await nothing_is_left(bench, live, name)
    await live.sh("pgrep -f '[b]ytearray'")
    back = await live.kill_and_restore(await live.checkpoint())
    await back.sh("pgrep -f '[b]ytearray'")


async def no_leftovers(bench: Bench, name: str) -> bool:
    assert name not in await bench.host.checkpoints()  # which removes what is left over
    folder = bench.host.checkpoint_path(name).parent
    return not any(name in entry.name for entry in folder.iterdir())


async def test_killed_in_the_middle_attaching_thaws(bench: Bench, home: Path) -> None:
    live = await ballasted(bench, 200_000_000)
    await killed_checkpointer(bench, home, live)
    await until(lambda: _thawed_by_attaching(bench, live))
    assert await live.sh("echo fine") == "fine\n"


async def _thawed_by_attaching(bench: Bench, live: Live) -> bool:
    async with await bench.host.attach(live.incarnation):
        return not held(live.incarnation)


async def test_a_frozen_container_can_be_removed(bench: Bench) -> None:
    live = await bench.create()
    await live.sh("sleep 1000 &")
    freezer(live.incarnation).freeze(live.incarnation.name)
    await within(bench.host.remove(live.incarnation.name))
    assert await bench.host.incarnations(bench.run) == []


async def test_killed_while_being_captured(bench: Bench) -> None:
    live, name, working = await capturing(bench)
    os.kill(live.incarnation.pid, signal.SIGKILL)
    await within(live.sandbox.wait_dead())
    done = await asyncio.gather(working, return_exceptions=True)
    if name in await bench.host.checkpoints():
        back = await bench.restore(name, 1)
        await back.sh("pgrep -f '[b]ytearray'")
    else:
        assert isinstance(done[0], CheckpointFailedError | SandboxFailedError)


@pytest.mark.parametrize("attempt", range(4))
async def test_criu_killed_in_the_middle(bench: Bench, attempt: int) -> None:
    live = await ballasted(bench, 100_000_000 * attempt + 1)
    failure = None
    while failure is None:  # it may be done before we are given a turn to see it
        name = bench.name()
        working = asyncio.ensure_future(bench.host.checkpoint(live.incarnation, name, 1))
        await until(lambda working=working: criu_at_work(live.incarnation) or working.done(), what="CRIU")
        if worker := criu_at_work(live.incarnation):
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        (outcome,) = await asyncio.gather(working, return_exceptions=True)
        failure = outcome if isinstance(outcome, BaseException) else None
    assert isinstance(failure, CheckpointFailedError | SandboxFailedError)
    if isinstance(failure, CheckpointFailedError):
        await nothing_is_left(bench, live, name)
        await live.sh("pgrep -f '[b]ytearray'")
    else:  # it was just running a system call of its own in process 1
        assert not await bench.host.is_alive(live.incarnation)
        assert await no_leftovers(bench, name)


def held(incarnation: Incarnation) -> bool:
    """Whether a checkpoint holds the container's processes now."""
    return freezer(incarnation).freezing or criu_at_work(incarnation) > 0


def criu_at_work(incarnation: Incarnation) -> int:
    """The process that traces the container's process 1; 0 while none does."""
    for line in Path(f"/proc/{incarnation.pid}/status").read_text().splitlines():
        if line.startswith("TracerPid:"):
            return int(line.split()[1])
    return 0


def holds_nothing(pid: int) -> bool:
    """Whether the process has no open file, or is gone."""
    try:
        return not list(Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def small_disk(home: Path) -> Iterator[Path]:
    """The checkpoints' folder on a disk of 8 MB."""
    folder = home / "checkpoints"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("filled_by", ["layer", "processes"])
async def test_a_full_disk(bench: Bench, home: Path, small_disk: Path, filled_by: str) -> None:
    live = await bench.create()
    command = "head -c 20000000 /dev/urandom > blob" if filled_by == "layer" else BALLAST.format(size=20_000_000)
    await live.sh(command)
    name = bench.name()
    with pytest.raises(
        CheckpointRefusedError, match=r"[89]\d,\d+,\d+ bytes are needed .* and 8,388,608 bytes are free"
    ):
        await bench.host.checkpoint(live.incarnation, name, 1)
    await nothing_is_left(bench, live, name)
    assert list(small_disk.iterdir()) == []
    # As if somebody else had filled it meanwhile:
    async with open_host(home, spares=0, limits=Limits(spare_bytes=-(1 << 30))) as unaware:
        with pytest.raises(CheckpointFailedError, match=r"No space left|CRIU"):
            await unaware.checkpoint(live.incarnation, name, 2)
    await nothing_is_left(bench, live, name)
    assert list(small_disk.iterdir()) == []


async def checkpointer(home: Path, live: Live, name: str) -> asyncio.subprocess.Process:
    """A process of its own that makes a checkpoint, for us to kill."""
    at = live.incarnation
    fields = (at.name, at.container_id, at.image_digest, at.host, at.pid, at.pid_start_ticks, live.number)
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        CHECKPOINTER,
        str(home),
        name,
        *map(str, fields),
        cwd=Path(capture_module.__file__).parents[2],
    )


def has_ended(process: asyncio.subprocess.Process) -> bool:
    return process.returncode is not None


async def killed_checkpointer(bench: Bench, home: Path, live: Live) -> str:
    """The checkpoint that a process was making which was killed while it held the container."""
    while True:
        name = bench.name()
        process = await checkpointer(home, live, name)
        await until(lambda process=process: held(live.incarnation) or has_ended(process), what="held")
        process.kill()
        await process.wait()
        if name not in await bench.host.checkpoints():
            return name


async def test_removed_while_an_orphaned_criu_holds_it(bench: Bench, home: Path) -> None:
    live = await ballasted(bench, 200_000_000)
    tracer = 0
    while not (tracer and criu_at_work(live.incarnation) == tracer):  # it may be done before we see or stop it
        process = await checkpointer(home, live, bench.name())
        await until(lambda process=process: criu_at_work(live.incarnation) or has_ended(process), what="CRIU")
        if tracer := criu_at_work(live.incarnation):
            with suppress(ProcessLookupError):
                os.kill(tracer, signal.SIGSTOP)
        process.kill()
        await process.wait()
    await within(bench.host.remove(live.incarnation.name))
    assert await bench.host.incarnations(bench.run) == []
    await until(lambda: holds_nothing(tracer), what="CRIU to let go")


async def test_what_happens_after_publication_is_no_failure_of_the_checkpoint(bench: Bench, home: Path) -> None:
    live = await bench.create()
    await live.sh("echo one > file")
    (home / "run" / live.incarnation.name / "captured.new").mkdir()
    name = await live.checkpoint()
    assert name in await bench.host.checkpoints()
    await live.sh("echo two > file")
    (home / "run" / live.incarnation.name / "captured.new").rmdir()
    later = await live.checkpoint()
    assert await (await bench.restore(name, live.number - 1)).sh("cat file") == "one\n"
    assert await (await bench.restore(later, live.number)).sh("cat file") == "two\n"


DIES_ONCE_PUBLISHED = """
import os
def hook(event, arguments):
    if event == "open" and str(arguments[0]).endswith("captured.new"):
        os._exit(9)
sys.addaudithook(hook)
"""


async def test_a_checkpointer_that_dies_once_it_has_published_leaves_it_whole(bench: Bench, home: Path) -> None:
    live = await bench.create()
    await live.sh("echo one > file; sleep 1000 &")
    name = bench.name()
    imports, _, rest = CHECKPOINTER.partition("home, name")
    here = live.incarnation
    fields = [here.name, here.container_id, here.image_digest, here.host, here.pid, here.pid_start_ticks, live.number]
    arguments = ["-c", f"{imports}{DIES_ONCE_PUBLISHED}home, name{rest}", str(home), name, *map(str, fields)]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments)
    assert await within(process.wait()) == 9
    assert name in await bench.host.checkpoints()
    await live.sh("echo two >> file")
    later = await live.checkpoint()
    assert await (await bench.restore(name, live.number - 1)).sh("cat file; pgrep -c sleep") == "one\n1\n"
    await bench.host.remove_checkpoint(name)
    assert await (await bench.restore(later, live.number)).sh("cat file") == "one\ntwo\n"
