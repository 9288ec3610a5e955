"""Waiting for a stream's state, also across a restart of the journal's server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from belayer.errors import JournalUnavailableError
from belayer.ids import StreamId
from belayer.journal.codec import Recorded
from belayer.journal.store import JournalStore
from belayer.journal.writer import Reader

S = TypeVar("S")
RETRY_S = 0.05


async def wait_until(
    store: JournalStore,
    stream: StreamId,
    fold: Callable[[Iterable[Recorded], S], S],
    empty: S,
    wanted: Callable[[S], bool],
    what: str,
    timeout_s: float,
) -> S:
    """The state of the stream as soon as it is `wanted`. TimeoutError, which names `what`, when it is not in time."""
    deadline = time.monotonic() + timeout_s
    reader = Reader(store, stream)
    state = empty
    while True:
        try:
            state = fold(await reader.catch_up(), state)
            if wanted(state):
                return state
            left_s = deadline - time.monotonic()
            if left_s > 0:
                await reader.wait(left_s)
        except JournalUnavailableError:
            await asyncio.sleep(RETRY_S)
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{stream}: {what} did not come within {timeout_s:.0f} s; are the actors running?")
