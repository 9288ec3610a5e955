"""One request on its way through however many engines it takes, into the journal and then to its callers.

Invariant: its answer grows by exactly what the journal has acknowledged. An engine that fails costs the request
nothing: the next one is given the prompt and the journaled tokens. When the journal or all engines are away for too
long the generation stays unfinished in the journal, for the same request to resume; a request that cannot be answered
or that nobody waits for any more is aborted there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from belayer.client import CHUNK_S, Trajectory
from belayer.errors import (
    ArchivedError,
    BelayerError,
    EngineFailedError,
    FencedError,
    InputError,
    JournalError,
    JournalUnavailableError,
    PrefixRefusedError,
    WrongSequenceError,
)
from belayer.gpu.gateway.answer import Answer
from belayer.gpu.gateway.engines import Engines
from belayer.gpu.gateway.errors import RefusedError, conflict, later
from belayer.gpu.gateway.flow import Flow
from belayer.gpu.gateway.opening import Opened, opened
from belayer.gpu.gateway.pace import pause_s
from belayer.gpu.gateway.request import Asked
from belayer.gpu.gateway.settings import Settings
from belayer.gpu.gateway.text import Text, Tokenizer
from belayer.gpu.gateway.workers import Route, Workers
from belayer.gpu.protocol import TokenBatch
from belayer.gpu.resume_group import FellBehindError
from belayer.journal.store import JournalStore
from belayer.projections.trajectory import Generation

T = TypeVar("T")
ABORTED = "abort"
"""The finish reason of a generation that was given up."""
_AGAIN_S = 0.05
_TRIES = 5
"""Engines that break a request's stream, one after the other without a token, before the request is given up."""
_log = logging.getLogger("belayer.gateway")


@dataclass(frozen=True, slots=True)
class Around:
    """What a run works with."""

    store: JournalStore
    workers: Workers
    engines: Engines
    settings: Settings
    tokenizer: Tokenizer | None
    streams: Callable[[], int]
    """How many runs share the journal now."""


class Run:
    """`drive` is its life, in a task of its own."""

    def __init__(self, asked: Asked, around: Around) -> None:
        self.asked = asked
        self.answer = Answer(asked)
        self._around = around
        self._waiting: list[TokenBatch] = []
        """Given to the journal's client; not yet acknowledged."""
        self._task: asyncio.Task[None] | None = None
        self._given_up = ""
        self._source = ""
        """The incarnation that gave the last token."""

    def give_up(self, reason: str) -> None:
        """End the generation as aborted."""
        if self._task is not None and not self.answer.is_over and not self._given_up:
            self._given_up = reason
            self._task.cancel()

    async def drive(self) -> None:
        """From the journal to the end. Raises nothing but its own cancellation: what goes wrong is the answer's."""
        self._task = asyncio.current_task()
        trajectory: Trajectory | None = None
        limit_s = self._around.settings.request_timeout_s
        fail = self.answer.fail
        try:
            async with asyncio.timeout(limit_s):
                found = await self._kept(self._open)
                trajectory = found.trajectory
                self._begin(found)
                if trajectory is not None:
                    await self._generate(trajectory)
        except asyncio.CancelledError:
            if not self._given_up:
                fail(later("stopped", "this gateway is stopping; ask again with the same rid and your offset"))
                raise
            fail(RefusedError(410, "aborted", f"rid {self.asked.rid} was given up: {self._given_up}"))
            await self._abort(trajectory, self._given_up)
        except TimeoutError:
            fail(RefusedError(504, "timeout", f"not complete after {limit_s:g} s; see --request-timeout-s"))
            await self._abort(trajectory, "timeout")
        except RefusedError as error:
            fail(error)
        except (InputError, PrefixRefusedError) as error:
            fail(RefusedError(400, "engine_refused", str(error)))
            await self._abort(trajectory, "the engine refused the request")
        except (FencedError, WrongSequenceError) as error:
            fail(_taken(self.asked, error))
        except JournalUnavailableError as error:
            fail(later("journal_unavailable", f"{error}; ask again with the same rid and your offset", 5))
        except ArchivedError as error:
            fail(RefusedError(410, "archived", str(error)))
        except BelayerError as error:
            fail(RefusedError(500, "internal_error", str(error)))
        finally:
            fail(RefusedError(500, "internal_error", "a fault of the gateway's own; its log has the traceback"))

    async def _open(self) -> Opened:
        around, settings = self._around, self._around.settings
        run = settings.run or around.workers.run
        return await opened(around.store, self.asked, around.tokenizer, run, settings.journal_wait_s)

    def _begin(self, found: Opened) -> None:
        """Take over what the journal has of the answer."""
        asked, answer, tokenizer = self.asked, self.answer, self._around.tokenizer
        answer.prompt = found.prompt
        if tokenizer is not None:
            answer.text = Text(tokenizer, asked.stops, asked.trims_stops, asked.skips_special_tokens)
        ended = None
        if found.generation is not None:
            ended = found.generation.finish_reason
            self._take(found.generation)
        if ended == ABORTED:
            raise RefusedError(410, "aborted", f"rid {asked.rid} was given up; ask anew with another rid")
        if ended is not None:
            answer.complete(ended)
        answer.open()

    def _take(self, generation: Generation) -> None:
        token_ids, logprobs = generation.token_ids(), generation.logprobs()
        self._push(token_ids, generation.finish_reason == "stop")
        parts = [(slice(chunk.offset, chunk.offset + chunk.count), chunk.weight_version) for chunk in generation.chunks]
        self.answer.publish(TokenBatch(token_ids[part], logprobs[part], version) for part, version in parts)

    async def _generate(self, trajectory: Trajectory) -> None:
        """The generation, from however many engines it takes."""
        around, settings, answer = self._around, self._around.settings, self.answer
        avoid: dict[str, float] = {}
        tries = 0
        last: tuple[Route, str] | None = None
        while (kind := self._complete_already()) is None:
            route = await around.workers.pick(self.asked.name, avoid, settings.engine_wait_s, settings.handover_wait_s)
            before = trajectory.state.sequence
            offset = await self._kept(lambda route=route, before=before: _begun(trajectory, route, before))
            current = trajectory.state.generation
            assert current is not None and offset == len(answer.token_ids)
            request = f"{self.asked.rid}-g{current.number}-{offset}-{trajectory.state.sequence}"
            try:
                kind = await self._stream(trajectory, route, request, _resumed(last, route, settings.adopts_kv))
                break
            except EngineFailedError as error:
                tries = 1 if len(answer.token_ids) > offset else tries + 1
                if tries >= _TRIES:
                    what = f"{tries} tries brought no token; the last: {error}; ask again with the same rid"
                    raise RefusedError(502, "engine_failed", what) from None
                if not isinstance(error, FellBehindError):
                    avoid[route.incarnation] = await around.engines.failed(route, error.evidence)
                last = route, request
        await self._end(trajectory, kind)

    async def _stream(self, trajectory: Trajectory, route: Route, request: str, resumes: str) -> str:
        """Journal and publish what one engine gives, but for the last tokens; why those are the last."""
        settings, answer = self._around.settings, self.answer
        engine = self._around.engines.connect(route)
        prefix = answer.prompt + answer.token_ids.tolist()
        sampling = self.asked.sampling(len(answer.token_ids))
        async with Flow(engine.generate(request, prefix, sampling, resumes=resumes)) as flow:
            while True:
                begun = time.monotonic()
                for batch in await flow.take():
                    if batch.token_ids and self._source != route.incarnation:
                        answer.resumes += self._source != ""
                        self._source = route.incarnation
                    if (kind := await self._append(trajectory, batch)) is not None:
                        return kind
                await self._keep_up(trajectory)
                pause = pause_s(self._around.streams(), settings.appends_per_s) if answer.is_watched else CHUNK_S
                await flow.gather(begun + pause - time.monotonic())
                await answer.wait_for_callers(settings.lag_tokens)

    async def _append(self, trajectory: Trajectory, batch: TokenBatch) -> str | None:
        """Hand a batch's tokens to the journal's client, as far as they belong to the answer; why they are the last."""
        kind = batch.finish_reason
        taken = self._push(batch.token_ids, kind == "stop")
        if self.answer.text is not None and self.answer.text.matched is not None:
            kind = "stop"
        if taken:
            tokens = TokenBatch(batch.token_ids[:taken], batch.logprobs[:taken], batch.weight_version)
            await self._kept(lambda: trajectory.append_tokens(tokens.token_ids, tokens.logprobs, tokens.weight_version))
            self._waiting.append(tokens)
        return kind

    def _push(self, token_ids: Sequence[int], stopped: bool) -> int:
        """Add tokens to the text; how many of them belong to the answer, which a stop string may end."""
        text = self.answer.text
        if text is None:
            return len(token_ids)
        for at, token_id in enumerate(token_ids, 1):
            push = text.push_last if stopped and at == len(token_ids) else text.push
            if push(token_id):
                return at
        return len(token_ids)

    def _complete_already(self) -> str | None:
        """Whether the journaled tokens are the whole answer, though nobody said so."""
        asked, answer = self.asked, self.answer
        count = len(answer.token_ids)
        if answer.text is not None and answer.text.matched is not None:
            return "stop"
        if count and answer.token_ids[-1] in asked.stop_token_ids:
            return "stop"
        return "length" if asked.max_new_tokens is not None and count >= asked.max_new_tokens else None

    async def _keep_up(self, trajectory: Trajectory) -> None:
        """Journal what waits, then publish it."""
        await self._kept(trajectory.flush)
        self._publish()

    def _publish(self) -> None:
        self.answer.publish(self._waiting)
        self._waiting.clear()

    async def _end(self, trajectory: Trajectory, kind: str) -> None:
        """The answer is complete."""
        await self._kept(lambda: trajectory.finish_generation(kind))
        self._publish()
        self.answer.complete(kind)
        if not self.asked.trajectory:
            await self._kept(lambda: _finished(trajectory, kind))

    async def _abort(self, trajectory: Trajectory | None, reason: str) -> None:
        """Say in the journal that this generation is not gone on with."""
        if trajectory is None:
            return
        try:
            if trajectory.state.generation is not None:
                await trajectory.finish_generation(ABORTED)
            if not self.asked.trajectory and trajectory.state.phase == "open":
                await trajectory.abort(reason)
        except JournalError as error:
            _log.warning("%s was given up (%s), but the journal does not say so: %s", self.asked.rid, reason, error)

    async def _kept(self, call: Callable[[], Awaitable[T]]) -> T:
        """The call's result, however long the journal is away, within the limit. The call can be made again."""
        deadline = time.monotonic() + self._around.settings.journal_wait_s
        while True:
            try:
                return await call()
            except JournalUnavailableError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_AGAIN_S)


async def _begun(trajectory: Trajectory, route: Route, before: int) -> int:
    """Begin or resume the generation; after a lost reply that left the stream beyond `before`, it has begun."""
    await trajectory.flush()
    state = trajectory.state
    if state.generation is not None and state.sequence > before:
        return state.generation.count
    return await trajectory.begin_generation(route.worker, route.incarnation)


async def _finished(trajectory: Trajectory, reason: str) -> None:
    await trajectory.flush()
    if trajectory.state.phase == "open":
        await trajectory.finish(reason)


def _resumed(last: tuple[Route, str] | None, route: Route, adopts_kv: bool) -> str:
    """The id under which an engine that adopts KV caches knows the request from the engine before it."""
    if last is None or not adopts_kv or last[0].worker != route.worker or last[0].incarnation == route.incarnation:
        return ""
    return last[1]


def _taken(asked: Asked, error: FencedError | WrongSequenceError) -> RefusedError:
    return conflict(
        "taken_over",
        f"trajectory {asked.name} was taken over by another writer ({error}); after a recovery go on from its live "
        "prefix, otherwise whoever took it has the request",
    )
