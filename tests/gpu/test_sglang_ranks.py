"""Real SGLang on the CPU in fp32, of two tensor parallel ranks: one dies in mid-stream, and the tokens are the same."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from belayer.processes import start_ticks, wait_exit
from tests.gpu import sglang_cell
from tests.gpu.sglang_cell import MARKS, PROMPTS, Cell, run_through_a_failure
from tests.waiting import within

pytestmark = MARKS


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cell]:
    """Engines of two ranks, each with a memory server of its own. One shadow: each costs half a minute."""
    async for made in sglang_cell.cell(tmp_path_factory.mktemp("pair"), ranks=2, shadows=1):
        yield made


async def test_a_rank_dies_the_other_is_ended_and_the_tokens_are_the_same(pair: Cell) -> None:
    ranks = [engine.pid for status in await pair.host.statuses() for engine in status.engines if engine.holds_arena]
    processes = [(pid, start_ticks(pid)) for pid in (pair.main.pid, *ranks)]
    assert len(set(processes)) == 3
    pair.host.early = True
    tokens, kinds = await run_through_a_failure(pair, "r", signal.SIGKILL, rank=1)
    assert kinds == ["dying"]
    await within(asyncio.gather(*(wait_exit(*process) for process in processes)))
    assert [status.holder for status in await pair.host.statuses()] == [pair.main.incarnation] * 2
    assert pair.host.facts[pair.main.incarnation]["adopted_requests"] == len(PROMPTS)
    assert tokens == pair.undisturbed
