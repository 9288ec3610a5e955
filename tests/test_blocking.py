"""The blocking client: the same journal, from code without asyncio, in whichever event loop there is."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
from pathlib import Path

import pytest

from belayer.blocking import BlockingJournal, BlockingTrajectory, new_event_loop
from belayer.client import Trajectory
from belayer.errors import ArchivedError, InputError, JournalUnavailableError, ProtocolError
from belayer.projections.trajectory import Boundary
from tests.cli.command import belayer


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_trajectory_is_written_and_gone_on_with(
    loop: str, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if loop == "asyncio":
        monkeypatch.setitem(sys.modules, "uvloop", None)
    with BlockingJournal(redis_url, namespace=namespace) as journal:
        with journal.trajectory("t") as trajectory:
            trajectory.start("run", "task", [1, 2])
            assert trajectory.begin_generation("w", "w-1") == 0
            trajectory.append_tokens([10, 11, 12], [-0.5, -1.0, -1.5])
        with journal.trajectory("t", writer="another") as trajectory:
            assert trajectory.begin_generation("w", "w-2") == 3
            trajectory.finish_generation("stop")
            assert trajectory.start_action("ls", 60.0, "box") == 1
            assert trajectory.commit_action(0, [20], b"digest", 0.2) == Boundary(1, trajectory.state.sequence)
            trajectory.finish("done", reward=0.5)
            assert trajectory.state.context() == [1, 2, 10, 11, 12, 20]


def test_errors_come_back_to_the_caller(redis_url: str, namespace: str) -> None:
    with BlockingJournal(redis_url, namespace=namespace) as journal:
        trajectory = journal.trajectory("t")
        with pytest.raises(ProtocolError, match="no generation"):
            trajectory.append_tokens([1], [-0.5])
    with pytest.raises(JournalUnavailableError, match="is the server up"):
        BlockingJournal("unix:///nowhere/at/all.sock")


def test_a_trajectory_that_is_in_the_archive_is_opened(redis_url: str, namespace: str, tmp_path: Path) -> None:
    with BlockingJournal(redis_url, namespace=namespace, archive=str(tmp_path)) as journal:
        with journal.trajectory("t") as trajectory:
            trajectory.start("run", "task", [1, 2])
            trajectory.finish("done")
        archived = belayer("archive", "run", "--url", redis_url, "--namespace", namespace, "--archive", str(tmp_path))
        assert archived.stdout == "archived 1 trajectories; 0 stay\n"
        with journal.trajectory("t", writer="learner") as trajectory:
            assert (trajectory.state.phase, trajectory.state.context()) == ("finished", [1, 2])
    with BlockingJournal(redis_url, namespace=namespace) as journal, pytest.raises(ArchivedError):
        journal.trajectory("t")


def test_an_archive_that_cannot_be_opened_leaves_nothing_at_work(
    redis_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InputError, match="nosuch"):
        BlockingJournal(redis_url, namespace=namespace, archive="nosuch://archive")
    gc.collect()
    assert caplog.messages == [], "asyncio tells of tasks that nobody has ended"


@pytest.mark.parametrize("installed", [True, False])
def test_uvloop_is_used_when_it_is_installed(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = new_event_loop()
    assert (type(loop).__module__ == "uvloop") is installed
    assert isinstance(loop, asyncio.AbstractEventLoop)
    loop.close()


def test_it_has_every_call_of_the_asynchronous_client_with_the_same_arguments() -> None:
    def calls(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(call).parameters)
            for name, call in vars(kind).items()
            if inspect.isfunction(call) and not name.startswith("_")
        }

    assert calls(BlockingTrajectory) == calls(Trajectory)
    opened = inspect.signature(Trajectory.open).parameters
    blocking = inspect.signature(BlockingJournal.trajectory).parameters
    assert {name: opened[name].default for name in opened if name != "store"} == {
        name: blocking[name].default for name in blocking if name != "self"
    }
