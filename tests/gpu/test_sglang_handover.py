"""Real SGLang on the CPU in fp32: its scheduler dies or is stopped in mid-stream, and the tokens are the same."""

from __future__ import annotations

import asyncio
import signal

from belayer.gpu import wire
from belayer.gpu.memory_client import MemoryClient
from tests.gpu.sglang_cell import MARKS, PROMPTS, TOKENS, Cell, ask, run_through_a_failure
from tests.waiting import DEADLINE_S, within

pytestmark = MARKS


async def test_taken_over_while_the_dead_engine_writes_on_the_tokens_are_the_same(cell: Cell) -> None:
    """Early mode at its worst: the dead engine writes NaN for as long as it takes, wherever it could (zombie.py)."""
    watching = asyncio.Event()
    events = cell.host.events(watching)
    parts: list[list[int]] = [[] for _ in PROMPTS]
    streams = [asyncio.create_task(ask(cell, f"z{n}", prompt, parts[n])) for n, prompt in enumerate(PROMPTS)]
    first_event = asyncio.ensure_future(anext(events))
    await watching.wait()
    while not all(len(part) > 20 for part in parts):
        await asyncio.wait(streams, timeout=0.01)
    alive, rounds = cell.folder / cell.main.incarnation, cell.folder / f"{cell.main.incarnation}.rounds"
    alive.touch()
    assert (await within(first_event)).kind == "dying"
    for stream in streams:
        stream.cancel()
    await asyncio.wait(streams, timeout=DEADLINE_S)
    old, cell.main = cell.main, cell.shadows.pop(0)
    with MemoryClient.connect(cell.folder / "memory.sock", "test", "control")[0] as client:
        promote = wire.Promote(cell.main.incarnation, False, True, True, DEADLINE_S)
        facts = (await asyncio.to_thread(client.ask, promote, wire.Facts))[0].facts
    assert facts["early"] and facts["adopted_requests"] == len(PROMPTS)
    written = int(rounds.read_text())
    some = [min(len(part) + 700, TOKENS) for part in parts]  # more than the reserve has: some are retracted
    numbers = range(len(PROMPTS))
    await asyncio.gather(*(ask(cell, f"z{n}r", PROMPTS[n], parts[n], f"z{n}", some[n]) for n in numbers))
    assert [len(part) for part in parts] == some
    assert int(rounds.read_text()) > written, "the dead engine wrote nothing in the meantime"
    alive.unlink()
    assert (await within(anext(events))).kind == "dead"
    await events.aclose()
    await cell.host.kill(old)
    await asyncio.gather(*(ask(cell, f"z{n}s", PROMPTS[n], parts[n]) for n in numbers))
    assert parts == cell.undisturbed


async def test_stopped_it_counts_as_hung_and_refilled_the_tokens_are_the_same(cell: Cell) -> None:
    cell.host.adopt = cell.host.early = False
    tokens, kinds = await run_through_a_failure(cell, "h", signal.SIGSTOP)
    assert kinds == ["hung", "dying"]
    assert cell.host.facts[cell.main.incarnation]["adopted_tokens"] == 0
    assert tokens == cell.undisturbed
