"""The runner as a plain process, without Docker: what its numbers, outputs, timeouts and markers promise."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from belayer.errors import SandboxFailedError
from belayer.sandbox import control
from belayer.sandbox.answers import Last, Ran
from belayer.sandbox.containers import RUNNER
from tests.waiting import DEADLINE_S, until


class RunnerProcess:
    """A runner, its folder and one client of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = {"PATH": os.environ["PATH"], "GREETING": "hello"}
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", RUNNER, folder],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=folder.parent,
            env=environment,
            start_new_session=True,
        )
        self.channel = control.Channel("runner", folder)

    async def run(
        self, number: int, command: str, timeout_s: float = DEADLINE_S, limit: int = 1 << 20
    ) -> tuple[Ran, bytes]:
        return await self.channel.ask(request(number, command, timeout_s, limit), Ran, timeout_s + DEADLINE_S)

    @property
    def marker(self) -> tuple[str, int] | None:
        return control.read_marker(self.folder)


def request(number: int, command: str, timeout_s: float = DEADLINE_S, limit: int = 1 << 20) -> dict[str, Any]:
    return {
        "kind": "run",
        "number": number,
        "command": command,
        "timeout_s": timeout_s,
        "output_limit_bytes": limit,
    }


@asynccontextmanager
async def started(folder: Path) -> AsyncIterator[RunnerProcess]:
    control.make_folder(folder)
    runner = RunnerProcess(folder)
    try:
        yield runner
    finally:
        runner.channel.close()
        runner.process.kill()
        runner.process.communicate()
        for pid in processes_in(folder.parent):  # what the test's actions left in the background
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def processes_in(folder: Path) -> list[int]:
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if (process / "cwd").readlink() == folder:
                found.append(int(process.name))
    return found


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncIterator[RunnerProcess]:
    async with started(tmp_path / "control") as made:
        yield made


async def test_output_status_environment_and_folder(runner: RunnerProcess) -> None:
    header, output = await runner.run(1, "echo $GREETING; echo oops >&2; pwd; exit 3")
    assert output == f"hello\noops\n{runner.folder.parent}\n".encode()
    assert header.exit_status == 3
    assert not header.timed_out
    assert header.duration_s > 0


@pytest.mark.parametrize(
    ("command", "status"),
    [("true", 0), ("kill -TERM $$", 128 + 15), ("kill -KILL $$", 128 + 9), ("/nowhere", 127), ("exit 255", 255)],
)
async def test_exit_statuses(runner: RunnerProcess, command: str, status: int) -> None:
    header, _ = await runner.run(1, command)
    assert header.exit_status == status


async def test_input_is_empty_and_the_session_is_its_own(runner: RunnerProcess) -> None:
    _, output = await runner.run(1, 'cat; ps -o sid= -p $$; echo $$; sh -c "kill -PIPE \\$\\$"; echo $?')
    sid, pid, pipe_status = output.split()
    assert sid == pid
    assert int(pipe_status) == 128 + 13, "SIGPIPE must have its default effect again"


async def test_a_number_runs_once_and_is_answered_again(runner: RunnerProcess) -> None:
    first = await runner.run(1, "echo x >> runs; wc -l < runs")
    again = await runner.run(1, "echo x >> runs; wc -l < runs")
    assert first == again
    assert first[1].strip() == b"1"
    assert (runner.folder.parent / "runs").read_text() == "x\n"


async def test_a_number_that_runs_now_is_joined(runner: RunnerProcess) -> None:
    gate = runner.folder.parent / "gate"
    asked = asyncio.ensure_future(runner.run(1, "mkfifo gate; read line < gate; echo $line"))
    await until(gate.exists)
    other = control.Channel("runner", runner.folder)
    joined = asyncio.ensure_future(other.ask(request(1, "echo never"), Ran, DEADLINE_S))
    with pytest.raises(SandboxFailedError, match="action 1 is still running"):
        await runner.run(2, "true")
    assert runner.marker == ("busy", 1)
    await asyncio.to_thread(gate.write_text, "opened\n")
    assert await asked == await joined
    assert (await asked)[1] == b"opened\n"
    other.close()


async def test_forgotten_numbers_never_run_again(runner: RunnerProcess) -> None:
    for number in range(1, 12):
        await runner.run(number, f"echo {number} >> runs")
    with pytest.raises(SandboxFailedError, match="no longer kept"):
        await runner.run(1, "echo 1 >> runs")
    assert len((runner.folder.parent / "runs").read_text().split()) == 11


async def test_long_output_keeps_its_head_and_tail(runner: RunnerProcess) -> None:
    header, output = await runner.run(1, "seq 1 200000", limit=1000)
    whole = "".join(f"{n}\n" for n in range(1, 200001)).encode()
    assert len(output) == 1000
    assert output == whole[:500] + whole[-500:]
    assert header.dropped_bytes == len(whole) - 1000


async def test_no_output_at_all_is_kept_when_the_limit_is_zero(runner: RunnerProcess) -> None:
    header, output = await runner.run(1, "seq 1 1000", limit=0)
    assert (output, header.dropped_bytes) == (b"", 3893)


async def test_a_timeout_ends_the_whole_action_and_nothing_else(runner: RunnerProcess) -> None:
    _, output = await runner.run(1, "sleep 1000 & echo $!")
    earlier = int(output)
    command = "sleep 1001 & setsid sleep 1002 & (trap '' TERM; sleep 1003); echo never"
    header, output = await runner.run(2, f"ps -o pid= -C nothing; {command}", timeout_s=0.5)
    assert header.exit_status == 124
    assert header.timed_out
    assert b"never" not in output
    assert Path(f"/proc/{earlier}/cmdline").read_bytes().startswith(b"sleep\x001000")
    await until(lambda: processes_in(runner.folder.parent) == [earlier], what="the rest to be dead")


async def test_background_processes_neither_delay_nor_break(runner: RunnerProcess) -> None:
    command = "mkfifo gate; (while :; do read line < gate || continue; echo $line; echo $line >> heard; done) &"
    header, output = await runner.run(1, command)
    assert header.exit_status == 0
    assert output == b""
    for number in (2, 3):
        await runner.run(number, f"echo {number} > gate")
        await until(lambda n=number: f"{n}" in heard(runner), what=f"line {number}")
    await until(lambda: runner.marker == ("idle", 3))


def heard(runner: RunnerProcess) -> str:
    with suppress(FileNotFoundError):
        return (runner.folder.parent / "heard").read_text()
    return ""


async def test_the_marker_follows_the_work(runner: RunnerProcess) -> None:
    await until(lambda: runner.marker == ("idle", 0))
    asked = asyncio.ensure_future(runner.run(1, "mkfifo gate; read line < gate"))
    gate = runner.folder.parent / "gate"
    await until(gate.exists)
    assert runner.marker == ("busy", 1)
    await asyncio.to_thread(gate.write_text, "go\n")
    await asked
    await until(lambda: runner.marker == ("idle", 1))
    assert {path.name for path in runner.folder.iterdir()} >= {"doorbell", "idle-1"}
    await until(lambda: open_files(runner) == [runner.folder / "doorbell"])


def open_files(runner: RunnerProcess) -> list[Path]:
    """Those of its folder that the runner has open."""
    found = []
    for path in Path(f"/proc/{runner.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(path.readlink())
    return [path for path in found if path.is_relative_to(runner.folder)]


async def test_rubbish_in_the_folder_is_dropped(runner: RunnerProcess) -> None:
    (runner.folder / "request-zzz").write_bytes(b"{")
    (runner.folder / "request-list").write_text(json.dumps([1]))
    (runner.folder / "request-kind").write_text(json.dumps({"kind": "run", "number": None}))
    _, output = await runner.run(1, "echo fine")
    assert output == b"fine\n"
    assert runner.process.poll() is None


async def test_a_runner_that_moved_to_a_fresh_folder_goes_on(runner: RunnerProcess, tmp_path: Path) -> None:
    """What a restore does, as far as the folder goes: the runner's marker is there, its old clients are not."""
    await runner.run(1, "true")
    await until(lambda: runner.marker == ("idle", 1))
    for path in list(runner.folder.iterdir()):
        if path.name != "doorbell":
            path.unlink()
    runner.channel.close()
    runner.channel = control.Channel("runner", runner.folder)
    header, _ = await runner.channel.ask({"kind": "ping"}, Last, DEADLINE_S)
    assert header.last == 1
    await until(lambda: runner.marker == ("idle", 1))


async def test_a_client_that_went_away_costs_nothing(runner: RunnerProcess) -> None:
    other = control.Channel("runner", runner.folder)
    asked = asyncio.ensure_future(other.ask(request(1, "mkfifo gate; read line < gate; echo $line"), Ran, DEADLINE_S))
    gate = runner.folder.parent / "gate"
    await until(gate.exists)
    asked.cancel()
    other.close()
    await asyncio.to_thread(gate.write_text, "go\n")
    _, output = await runner.run(1, "echo never")
    assert output == b"go\n"


async def test_silence_is_a_failure(tmp_path: Path) -> None:
    control.make_folder(tmp_path / "control")
    channel = control.Channel("nobody", tmp_path / "control")
    with pytest.raises(SandboxFailedError, match="did not answer within"):
        await channel.ask({"kind": "ping"}, Last, 0.1)
    channel.close()


async def test_a_hostile_folder_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "control"
    control.make_folder(folder)
    (folder / "doorbell").unlink()
    (tmp_path / "outside").write_text("untouched")
    (folder / "doorbell").symlink_to(tmp_path / "outside")
    channel = control.Channel("hostile", folder)
    with pytest.raises(SandboxFailedError, match="unusable"):
        await channel.ask({"kind": "ping"}, Last, 1.0)
    channel.close()
    assert (tmp_path / "outside").read_text() == "untouched"
