"""The examples do what they say: one goes on from wherever a trajectory stands, the other reads what it wrote."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType

import pytest

from belayer import ids
from belayer.client import Trajectory
from belayer.journal.export import export_streams
from belayer.journal.memory_store import MemoryStore

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def embedded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("embed_in_rollout", EXAMPLES / "embed_in_rollout.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STEPS: list[Callable[[Trajectory], Awaitable[object]]] = [
    lambda t: t.start(run="example", task="say hello", prompt=[1, 2, 3]),
    lambda t: t.begin_generation(worker="engine-0"),
    lambda t: t.append_tokens([101, 102], [-0.25, -0.25], weight_version=7),
    lambda t: t.flush(),
    lambda t: t.append_tokens([103], [-0.25], weight_version=7),
    lambda t: t.finish_generation("stop"),
    lambda t: t.start_action("echo hello", 60, "container-1"),
    lambda t: t.commit_action(0, list(b"hello\n"), b"x" * 16, 0.1),
]


@pytest.mark.parametrize("done", range(len(STEPS) + 1))
async def test_the_rollout_goes_on_from_wherever_its_process_ended(embedded: ModuleType, done: int) -> None:
    undisturbed = await embedded.roll_out(MemoryStore(), "t")
    store = MemoryStore()
    opened = await Trajectory.open(store, "t")
    for step in STEPS[:done]:
        await step(opened)
    state = await embedded.roll_out(store, "t")
    assert (state.phase, state.reward, state.boundary.number) == ("finished", 1.0, 2)
    assert state.context() == undisturbed.context()
    assert (await embedded.roll_out(store, "t")).sequence > state.sequence  # a finished one is left as it is


async def test_an_exported_journal_is_read_cell_by_cell(embedded: ModuleType, tmp_path: Path) -> None:
    store = MemoryStore()
    await embedded.roll_out(store, "t")
    await export_streams(store, [ids.trajectory("t")], tmp_path / "t.belayer")
    command = [sys.executable, str(EXAMPLES / "read_offline.py"), str(tmp_path / "t.belayer")]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].endswith("0 findings") and "t: finished, 2 actions, 0 rewinds, reward 1.0" in lines
    assert "t: 20 tokens, 5 of them trained on, mean logprob -0.250" in lines
    assert (tmp_path / "t.html").is_file()
