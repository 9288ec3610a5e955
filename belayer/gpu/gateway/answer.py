"""The answer to one request as far as the journal has it, and the callers who read it.

Invariant: tokens, logprobs and text are those that the journal has acknowledged, in order, and only ever grow; all
columns have one length. An answer ends in exactly one way: `finish`, or `failure`. Callers have a place in the answer,
not a copy of it, so one who is slow holds no memory; `wait_for_callers` lets the engine wait for him instead.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from belayer.client import CHUNK_TOKENS
from belayer.gpu.gateway.errors import RefusedError
from belayer.gpu.gateway.request import Asked
from belayer.gpu.gateway.text import Text
from belayer.gpu.protocol import TokenBatch


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an answer is complete."""

    kind: str
    matched: int | str | None = None
    length: int = 0

    def sglang(self) -> dict[str, object]:
        """As SGLang says it."""
        if self.kind == "stop":
            return {"type": "stop", "matched": self.matched}
        return {"type": self.kind, "length": self.length}


class Part(NamedTuple):
    """Tokens `start` to `stop` of an answer; with the finish, the last part."""

    start: int
    stop: int
    finish: Finish | None


class Caller:
    """One open HTTP request that reads an answer."""

    def __init__(self, offset: int, reads: bool) -> None:
        self.offset = offset
        """How many tokens it has."""
        self.reads = reads
        """Whether it takes tokens as they come."""


class Answer:
    """Written by its run, read by any number of callers."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.prompt: list[int] = []
        self.token_ids = array("I")
        self.logprobs = array("f")
        self.text: Text | None = None
        """May be ahead of the tokens; `Text.between` gives what belongs to them."""
        self.resumes = 0
        """How often a token came from another engine than the one before it, both through this gateway."""
        self.finish: Finish | None = None
        self.failure: RefusedError | None = None
        self.is_open = False
        """The journal has the request, and everything that it had of its tokens is here."""
        self.callers: set[Caller] = set()
        self.departures = 0
        """How often a caller has left."""
        self._versions: list[tuple[int, int]] = []
        """Where (offset) which weight version begins."""
        self._changed = asyncio.Event()
        self._read_on = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self.finish is not None or self.failure is not None

    @property
    def is_watched(self) -> bool:
        """Whether somebody takes the tokens as they come."""
        return any(caller.reads for caller in self.callers)

    def version_at(self, count: int) -> int:
        """The weight version of the last of `count` tokens; 0 before the first."""
        return next((version for start, version in reversed(self._versions) if start < count), 0)

    # --- for callers -----------------------------------------------------------------------------------------------

    async def opened(self) -> None:
        """Return once it is open; raises what refused it."""
        while not self.is_open:
            if self.failure is not None:
                raise self.failure
            await self._changed.wait()

    async def ended(self) -> Finish:
        """Return at the finish; raises the failure."""
        while self.finish is None:
            if self.failure is not None:
                raise self.failure
            await self._changed.wait()
        return self.finish

    async def parts(self, caller: Caller) -> AsyncIterator[Part]:
        """What comes after the caller's offset, a chunk at most at a time; raises a failure after the last token."""
        while True:
            while caller.offset == len(self.token_ids) and not self.is_over:
                await self._changed.wait()
            stop = min(len(self.token_ids), caller.offset + CHUNK_TOKENS)
            part = Part(caller.offset, stop, self.finish if stop == len(self.token_ids) else None)
            if part.finish is None and part.start == part.stop:
                assert self.failure is not None
                raise self.failure
            yield part
            caller.offset = part.stop
            self._read_on.set()
            if part.finish is not None:
                return

    def leave(self, caller: Caller) -> None:
        """The caller is gone."""
        self.callers.discard(caller)
        self.departures += 1
        self._read_on.set()

    # --- for the run -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """The journal has the request."""
        self.is_open = True
        self._tell()

    def publish(self, batches: Iterable[TokenBatch]) -> None:
        """The journal has these tokens: callers may have them."""
        for batch in batches:
            if not self._versions or self._versions[-1][1] != batch.weight_version:
                self._versions.append((len(self.token_ids), batch.weight_version))
            self.token_ids.extend(batch.token_ids)
            self.logprobs.extend(batch.logprobs)
        self._tell()

    def complete(self, kind: str) -> None:
        """The journal has the end of it: "stop" or "length"."""
        matched = None
        if self.text is not None:
            self.text.end()
            matched = self.text.matched
        if kind == "stop" and matched is None and self.token_ids:
            matched = self.token_ids[-1]
        self.finish = Finish(kind, matched, len(self.token_ids))
        self._tell()

    def fail(self, failure: RefusedError) -> None:
        """It ends here, unless it has ended before."""
        if not self.is_over:
            self.failure = failure
            self._tell()

    async def wait_for_callers(self, lag_tokens: int) -> None:
        """Return when some caller has nearly all tokens, or there is none who reads."""
        while (readers := [caller.offset for caller in self.callers if caller.reads]) and (
            len(self.token_ids) - max(readers) > lag_tokens
        ):
            self._read_on.clear()
            await self._read_on.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
