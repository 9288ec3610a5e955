"""Reads an engine's stream ahead of whoever takes from it, and no further than a limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType

from belayer.client import CHUNK_TOKENS
from belayer.gpu.protocol import TokenBatch

_AHEAD_TOKENS = 4 * CHUNK_TOKENS


class Flow:
    """An async context around an engine's stream; leaving it closes the stream, and so aborts the request."""

    def __init__(self, batches: AsyncGenerator[TokenBatch]) -> None:
        self._batches = batches
        self._waiting: list[TokenBatch] = []
        self._count = 0
        self._arrived = asyncio.Event()
        self._pressing = asyncio.Event()
        """A whole chunk waits, or the end."""
        self._room = asyncio.Event()

    async def __aenter__(self) -> Flow:
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()  # it was raised by `take`, or nobody is left whom it concerns

    async def take(self) -> list[TokenBatch]:
        """All that has come since the last call, at least one batch. Raises what ended the stream, after its tokens."""
        await self._arrived.wait()
        if not self._waiting:
            await self._task
            raise RuntimeError("an engine's stream ended without a finish reason and without an error")
        taken, self._waiting, self._count = self._waiting, [], 0
        self._room.set()
        if not self._task.done():
            self._arrived.clear()
            self._pressing.clear()
        return taken

    async def gather(self, pause_s: float) -> None:
        """Let tokens gather for this long; less when a whole chunk of them, or the end, has come."""
        if pause_s > 0:
            try:
                async with asyncio.timeout(pause_s):
                    await self._pressing.wait()
            except TimeoutError:
                return

    async def _read(self) -> None:
        try:
            async with aclosing(self._batches) as batches:
                async for batch in batches:
                    self._waiting.append(batch)
                    self._count += len(batch.token_ids)
                    self._arrived.set()
                    if batch.finish_reason is not None or self._count >= CHUNK_TOKENS:
                        self._pressing.set()
                    while self._count >= _AHEAD_TOKENS:
                        self._room.clear()
                        await self._room.wait()
        finally:
            self._arrived.set()
            self._pressing.set()
