"""The whole demo on a short trajectory: real engines, containers, actors and Redis, each kind of failure once."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from belayer.demo.failures import Kind
from belayer.demo.report import RunReport
from belayer.demo.run import Options, run_demo
from belayer.demo.view import View
from belayer.journal.codec import decode_entry
from belayer.journal.events import FailureDetected
from belayer.journal.export import read_export
from belayer.sandbox.docker_host import DockerHost, open_host
from replay.audit import audit
from tests.command_lines import command_lines
from tests.waiting import DEADLINE_S, until, within

pytestmark = [pytest.mark.sandbox, pytest.mark.chaos]

SHIPPED = Path(__file__).resolve().parents[2] / "examples" / "trajectories"
NAME = "sqlfluff__sqlfluff-2419"
ADDED = (
    "nohup sleep 1000 >/dev/null 2>&1 & echo begun",
    "sleep 0.6; pgrep -xc sleep | tee -a lives.txt",
    "sleep 0.6; wc -l < lives.txt; pgrep -xf 'sleep 1000' >/dev/null && echo it lives",
)


@pytest.fixture
def trajectories(tmp_path: Path) -> Path:
    """The first and last turns of a shipped trajectory, with turns in between that use a background process."""
    document = json.loads((SHIPPED / f"{NAME}.traj.json").read_text())
    said = [message for message in document["messages"] if message["role"] == "assistant"]
    added = [{"role": "assistant", "content": f"I look at the process again: {command}"} for command in ADDED]
    for message, command in zip(added, ADDED, strict=True):
        message["extra"] = {"actions": [{"command": command}]}  # type: ignore[assignment]
    document["messages"] = [*document["messages"][:2], *said[:8], *added[:2], *said[20:26], added[2], *said[-4:]]
    folder = tmp_path / "trajectories"
    folder.mkdir()
    (folder / f"{NAME}.traj.json").write_text(json.dumps(document))
    return folder


@pytest.fixture
async def host() -> AsyncIterator[DockerHost]:
    async with open_host() as opened:
        yield opened


class Notes:
    """A board that keeps what it is shown."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.reports: list[RunReport] = []

    def step(self, text: str) -> None:
        self.steps.append(text)

    def row(
        self, trajectory: str, label: str, turns: int, view: View, struck: Callable[[], int], failures: int
    ) -> None:
        self.steps.append(f"{trajectory} {label}")

    def done(self, report: RunReport) -> None:
        self.reports.append(report)


async def test_a_trajectory_survives_a_failure_of_each_kind(
    trajectories: Path, tmp_path: Path, host: DockerHost
) -> None:
    kinds = tuple(Kind)[:6]  # each needs some turns, and this trajectory is short
    options = Options(trajectories, kinds, runs=1, seed=3, results=tmp_path / "results")
    board = Notes()
    report = await within(run_demo(options, board), 900.0)
    assert report.as_json()["details"] == []
    assert report.good and [run.label for run in board.reports] == ["undisturbed", "failures 1"]
    assert sorted(recovery.kind for recovery in report.recoveries) == sorted(kinds)
    assert all(recovery.resumed_s is not None for recovery in report.recoveries)
    assert report.export is not None and [page.exists() for page in report.timelines] == [True]
    failures: list[Any] = []
    for stream, entry in read_export(report.export):
        for recorded in decode_entry(stream, entry.epoch, entry.last_sequence, entry.body):
            failures += [recorded.event] if isinstance(recorded.event, FailureDetected) else []
    assert len(failures) >= 5, "the export has the failures that were detected"
    assert audit(read_export(report.export)).findings == []
    run = report.export.parent.name
    assert await host.incarnations(run) == []
    assert not [checkpoint for checkpoint in await host.checkpoints() if run in checkpoint]


@pytest.fixture
def demo(trajectories: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`belayer demo` as a process, with a folder of its own for temporary files."""
    (tmp_path / "t").mkdir()
    command = [sys.executable, "-m", "belayer.cli", "demo", "--trajectories", str(trajectories), "--runs", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": f"{tmp_path}/t"},
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_demo_leaves_nothing_behind(
    demo: subprocess.Popen[str], host: DockerHost, tmp_path: Path, number: signal.Signals
) -> None:
    temporary = tmp_path / "t"

    async def containers() -> list[str]:
        return [name for run in _runs_of(demo.pid) for name in await host.incarnations(run)]

    await until(containers, what="a container of the demo")
    (run,) = _runs_of(demo.pid)
    helpers = _helpers_of(run, temporary)
    assert helpers, "actors and engines run"
    demo.send_signal(number)
    out, _ = await asyncio.to_thread(demo.communicate, timeout=DEADLINE_S)
    assert demo.returncode == 130 and "Traceback" not in out
    assert await host.incarnations(run) == []
    assert not [checkpoint for checkpoint in await host.checkpoints() if run in checkpoint]
    assert not list(temporary.glob("belayer-demo-*"))
    await until(lambda: not _helpers_of(run, temporary), what="the end of actors and engines")


def _runs_of(owner: int) -> list[str]:
    """The run that the demo's actors were started for."""
    owned = [words for _, words in command_lines() if "--run" in words and str(owner) in words]
    return sorted({words[words.index("--run") + 1] for words in owned})


def _helpers_of(run: str, temporary: Path) -> list[str]:
    """Actors, engines and servers of the run that still live."""
    lines = [" ".join(words) for pid, words in command_lines() if pid != os.getpid()]
    return [line for line in lines if run in line or str(temporary / "belayer-demo-") in line]
