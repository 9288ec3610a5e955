"""Requests that resume in the same moment and share one HTTP request, and what comes of it for each.

Invariant: each takes its own tokens, in order, and nobody waits for another. One whose caller reads so slowly that
more than `UNREAD_TOKENS` tokens wait leaves the group with FellBehindError: not to read on would hold up the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any

from belayer.errors import EngineFailedError
from belayer.gpu.protocol import TokenBatch

UNREAD_TOKENS = 4096


class FellBehindError(EngineFailedError):
    """The engine is well: ask it again, by a request of its own, which waits for its reader."""


class Member:
    """One request of a group: its tokens as they come, and last what ended it."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.received = 0
        """How many tokens have come."""
        self.runs = True
        """Whether the engine may still give it tokens, and it would take them."""
        self.error: Exception | None = None
        self.arrived = asyncio.Event()
        self._unread: deque[TokenBatch] = deque()
        self._unread_tokens = 0

    @property
    def is_full(self) -> bool:
        """Whether it may be given no more before its caller has read."""
        return self._unread_tokens >= UNREAD_TOKENS

    def give(self, batches: Iterable[TokenBatch]) -> None:
        """More tokens."""
        for batch in batches:
            if not batch.token_ids and batch.finish_reason is None:
                continue
            self._unread.append(batch)
            self._unread_tokens += len(batch.token_ids)
            self.received += len(batch.token_ids)
            self.runs = batch.finish_reason is None
            self.arrived.set()

    def end(self, error: Exception) -> None:
        """No more tokens: this is raised after the last."""
        if self.runs:
            self.runs, self.error = False, error
            self.arrived.set()

    def take(self) -> TokenBatch | None:
        """The oldest batch that was not read; None: wait until one has `arrived`. Raises what ended it, in its turn."""
        if self._unread:
            batch = self._unread.popleft()
            self._unread_tokens -= len(batch.token_ids)
            return batch
        if self.error is not None:
            raise self.error
        self.arrived.clear()
        return None


def joined(members: list[Member]) -> dict[str, Any]:
    """One GenerateReqInput for all of them."""
    bodies = [one.body for one in members]
    if len(bodies) == 1:
        return bodies[0]
    return bodies[0] | {name: [body[name] for body in bodies] for name in ("rid", "input_ids", "sampling_params")}
