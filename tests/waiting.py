"""Waiting for a condition with a deadline, for tests: no fixed sleeps, and a late condition names itself.

The deadline is there so that a failure ends. No test passes or fails by it on a machine that is merely busy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 120.0
"""How long a test waits for what must come; far more than the slowest machine needs."""


async def until(
    condition: Callable[[], T | Awaitable[T]], timeout_s: float = DEADLINE_S, what: str = "the condition"
) -> T:
    """The condition's first true value. It is asked again at every turn of the loop, at most every 5 ms."""
    deadline = time.monotonic() + timeout_s
    turn = asyncio.Event()
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {timeout_s:.1f} s")
        try:
            await asyncio.wait_for(turn.wait(), 0.005)
        except TimeoutError:
            continue


async def within(work: Awaitable[T], timeout_s: float = DEADLINE_S) -> T:
    """What the work gives; TimeoutError when it does not end."""
    return await asyncio.wait_for(work, timeout_s)
