"""Waiting for a condition with a deadline, for tests: no fixed sleeps, and a late condition names itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def until(condition: Callable[[], T | Awaitable[T]], timeout_s: float = 10.0, what: str = "the condition") -> T:
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
