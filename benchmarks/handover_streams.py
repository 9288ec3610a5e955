"""The caller's side of a handover measurement: streams that go on over a change of engine, with every arrival timed.

This is the gateway's job without its HTTP front: each stream keeps the tokens that it has, and when the engine is
changed asks the next one for the rest. Nothing is read from the old engine after the change.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from belayer.errors import EngineFailedError
from belayer.gpu.http_engine import HttpEngine
from belayer.gpu.protocol import Sampling

_CHANGE_WITHIN_S = 20.0


@dataclass
class Stream:
    """One request: what was asked and what has arrived, with the arrival time of each token (monotonic seconds)."""

    name: str
    prompt: list[int]
    max_new_tokens: int
    request: str = ""
    """Its id on the engine that it was last asked of. SGLang must not see an id twice."""
    token_ids: list[int] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    resumed_s: list[float] = field(default_factory=list)
    """When the first token came from each engine after the first."""


class Streams:
    """Many streams over one engine at a time."""

    def __init__(self, streams: Sequence[Stream], engine: HttpEngine) -> None:
        self.streams = list(streams)
        self._engine = engine
        self._changed = asyncio.Event()
        self._arrived = asyncio.Event()
        self._left: list[asyncio.Task[None]] = []

    def change(self, engine: HttpEngine) -> None:
        """From now on every unfinished stream is the next engine's."""
        self._engine = engine
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def run(self) -> None:
        """Until every stream has all its tokens."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for stream in self.streams:
                    tasks.create_task(self._follow(stream))
        finally:
            for left in self._left:
                left.cancel()
            await asyncio.gather(*self._left, return_exceptions=True)

    async def wait_tokens(self, count: int) -> None:
        """Until every stream has that many tokens."""
        while any(len(stream.token_ids) < min(count, stream.max_new_tokens) for stream in self.streams):
            self._arrived.clear()
            await self._arrived.wait()

    async def _follow(self, stream: Stream) -> None:
        while len(stream.token_ids) < stream.max_new_tokens:
            changed, engine = self._changed, self._engine
            reading = asyncio.create_task(self._read(stream, engine))
            waiting = asyncio.create_task(changed.wait())
            try:
                await asyncio.wait((reading, waiting), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                reading.cancel()
                waiting.cancel()
                raise
            if not reading.done():
                # It ends when it sees that the engine was changed; closing it now would make the next request wait.
                self._left.append(reading)
                continue
            if (error := reading.exception()) is not None:
                # Whoever watches the engine changes it soon; otherwise the error is one.
                await asyncio.wait((waiting,), timeout=_CHANGE_WITHIN_S)
                if not isinstance(error, EngineFailedError) or not waiting.done():
                    raise error
            waiting.cancel()

    async def _read(self, stream: Stream, engine: HttpEngine) -> None:
        left = stream.max_new_tokens - len(stream.token_ids)
        sampling = Sampling(max_new_tokens=left)
        resumes, stream.request = stream.request, f"{stream.name}-{os.urandom(4).hex()}"
        resuming = bool(resumes)
        batches = engine.generate(stream.request, stream.prompt + stream.token_ids, sampling, resumes=resumes)
        async with contextlib.aclosing(batches):
            async for batch in batches:
                now_s = time.monotonic()
                if engine is not self._engine:
                    return
                if resuming and batch.token_ids:
                    resuming = False
                    stream.resumed_s.append(now_s)
                stream.token_ids += batch.token_ids
                stream.arrived_s += [now_s] * len(batch.token_ids)
                self._arrived.set()
                if batch.finish_reason == "stop":
                    stream.max_new_tokens = len(stream.token_ids)
