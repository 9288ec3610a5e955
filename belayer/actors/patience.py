"""Waiting for work that another actor has under way, instead of fencing it off and beginning again.

Taking an epoch is always safe, but two actors that take it from each other again and again get nowhere. So an actor
that finds work under way waits until the journal shows its end. Work of a process that is dead, or dies meanwhile, or
whose epoch is over, is not under way; work that makes no progress within the patience is taken for dead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from belayer.actors.names import is_surely_dead, local_pid
from belayer.ids import StreamId
from belayer.journal.store import JournalStore
from belayer.processes import start_ticks, wait_exit


class Claimed(Protocol):
    """A folded state that knows who writes its stream."""

    @property
    def epoch(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def writer(self) -> str: ...


S = TypeVar("S", bound=Claimed)


async def settled(
    store: JournalStore,
    stream: StreamId,
    look: Callable[[], Awaitable[S]],
    begun_in: Callable[[S], int | None],
    host: str,
    patience_s: float,
) -> S:
    """The state once no work is under way. `begun_in`: the epoch in which the unfinished work was begun, if any is."""
    deadline, sequence = 0.0, -1
    while True:
        state = await look()
        if begun_in(state) != state.epoch or is_surely_dead(state.writer, host):
            return state
        if state.sequence != sequence:
            sequence, deadline = state.sequence, time.monotonic() + patience_s
        if (left_s := deadline - time.monotonic()) <= 0:
            return state
        await _longer_or_dead(store, stream, sequence, left_s, local_pid(state.writer, host))


async def _longer_or_dead(store: JournalStore, stream: StreamId, sequence: int, timeout_s: float, pid: int) -> None:
    """Return once the stream is longer than `sequence`, its writer (`pid` here, unless 0) dead, or time is up."""
    longer = asyncio.ensure_future(store.wait(stream, sequence, timeout_s))
    waits: set[asyncio.Future[Any]] = {longer}
    if pid:
        waits.add(asyncio.ensure_future(wait_exit(pid, start_ticks(pid))))
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if longer.done():
            longer.result()
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
