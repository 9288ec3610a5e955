"""Where the client's processor time goes in an append: `python -m benchmarks.journal_profile [TRAJECTORIES] [TOKENS]`.

Samples the running line at each tick of the kernel's clock while the client computes (SIGPROF, every 1 to 4 ms), so it
costs next to nothing. What a C function takes is put to the line that called it, or to the next one that Python runs.
cProfile would double the cost of each small Python function instead.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from belayer.journal.connect import open_store
from belayer.journal.durability import Durability
from benchmarks.journal import fresh_server
from benchmarks.journal_loads import Chunks, closed_loop, take_over_all

TOTAL = 131_072
_EVERY_S = 0.001
_SHOWN = 24
_ROOT = Path(__file__).parents[1]

Where = tuple[str, int]


@contextmanager
def sampled(found: collections.Counter[Where]) -> Iterator[None]:
    """Count the place of each sample."""

    def sample(number: int, frame: FrameType | None) -> None:
        if frame is not None:
            found[frame.f_code.co_filename, frame.f_lineno] += 1

    before = signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, _EVERY_S, _EVERY_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


async def profile(trajectories: int, tokens: int) -> str:
    """A table of the lines that took most, in microseconds a chunk."""
    found: collections.Counter[Where] = collections.Counter()
    async with fresh_server(Durability.EVERYSEC) as server:
        store = await open_store(server.url)
        writers = await take_over_all(store, [f"t{number}" for number in range(trajectories)])
        await closed_loop(writers, Chunks(tokens), TOTAL // 4)
        with sampled(found):
            run = await closed_loop(writers, Chunks(tokens), TOTAL)
        await store.close()
    each_us = run.cpu_s / run.chunks * 1e6
    lines = [f"{trajectories} trajectories, chunks of {tokens} tokens: {each_us:.1f} us a chunk, {run.rate:.0f}/s"]
    samples = sum(found.values())
    for (file, line), times in found.most_common(_SHOWN):
        text = Path(file).read_text().splitlines()[line - 1].strip() if Path(file).is_file() else ""
        lines.append(f"  {times / samples * each_us:5.2f} us  {os.path.relpath(file, _ROOT)}:{line}: {text[:90]}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile the journal's client.")
    parser.add_argument("trajectories", type=int, nargs="?", default=64)
    parser.add_argument("tokens", type=int, nargs="?", default=256)
    options = parser.parse_args()
    print(asyncio.run(profile(options.trajectories, options.tokens)))


if __name__ == "__main__":
    main()
