"""Is a killed engine gone altogether: its schedulers as well as its own process, and their memory on the GPU?

The engine's own process ends the others, each by a tie of its own (belayer/gpu/sglang_engine.py), and the driver frees
a process's GPU memory while the kernel ends it. Here both are looked at, not believed: whoever is left after a while is
killed, and what NVML still lists is said in the log, because the next engine may lack that memory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable

from belayer.gpu.usage import holding, processes_of
from belayer.processes import kill, start_ticks, wait_exit

_log = logging.getLogger("belayer.engines")
_END_S = 5.0
_LET_GO_S = 10.0
_LOOK_EVERY_S = 0.05

Process = tuple[int, int]
"""(pid, start ticks)."""


def processes_now(pid: int) -> frozenset[Process]:
    """The process and its descendants, as they are now."""
    return frozenset((one, ticks) for one in processes_of(pid) if (ticks := start_ticks(one)))


async def gone(incarnation: str, processes: Iterable[Process]) -> None:
    """Return once none of them is left, nor on a GPU; StillAliveError when one survives SIGKILL.

    An NVML that lists one of them for too long, or does not answer, is a warning: nothing more can be done about it.
    """
    processes = list(processes)
    ends = [asyncio.ensure_future(wait_exit(*process)) for process in processes]
    try:
        if ends:
            await asyncio.wait(ends, timeout=_END_S)
    finally:
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
    await asyncio.gather(*(kill(*process) for process in processes))
    left = await _let_go({pid for pid, _ in processes})
    if left:
        _log.warning("engine %s was killed, and after %.0f s the GPU still has its %s", incarnation, _LET_GO_S, left)


async def _let_go(pids: set[int]) -> str:
    """What is still on a GPU after the deadline; empty as soon as nothing is."""
    loop = asyncio.get_running_loop()
    answered = asyncio.Event()
    left: set[int] = set()

    def look() -> None:
        end_s = time.monotonic() + _LET_GO_S
        while (left_now := holding(pids)) and time.monotonic() < end_s:
            time.sleep(_LOOK_EVERY_S)
        left.update(left_now)
        if not loop.is_closed():
            loop.call_soon_threadsafe(answered.set)

    # A thread that nobody waits for at the end: a driver that hangs would keep this process from ending.
    threading.Thread(target=look, name="gpu-memory", daemon=True).start()
    try:
        await asyncio.wait_for(answered.wait(), 2 * _LET_GO_S)
    except TimeoutError:
        return "memory, for all that NVML says, which does not answer"
    return f"memory of {', '.join(map(str, sorted(left)))}" if left else ""
