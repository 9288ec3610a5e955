"""The journal client for rollout code: one trajectory, written as it happens, resumed from what was written.

Invariant: `Trajectory.state` is the fold of exactly the events that the journal has acknowledged to us under our
epoch; every call is checked against it before anything is stored, so a trajectory in the journal always reads as one.
Tokens wait here until there are `chunk_tokens` of them, or for `chunk_s` seconds; those of the newest call always wait,
because the end of the generation may come right behind them and belongs into the same append.

When it fails: FencedError means that recovery (or a second writer) has taken the trajectory over. `wait_resumed`,
then `open` again and go on from its state. JournalUnavailableError means that the journal did not answer in time; the
same call may be made again, or the trajectory opened again: what was acknowledged is there, once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType

from belayer.errors import (
    DamagedJournalError,
    FencedError,
    InputError,
    LimitError,
    MissingKeyError,
    ProtocolError,
    WrongSequenceError,
)
from belayer.ids import trajectory as trajectory_stream
from belayer.journal.codec import check_types
from belayer.journal.columns import TOKEN_BYTES, pack_logprobs, pack_loss_mask, pack_token_ids
from belayer.journal.events import (
    ActionCommitted,
    ActionStarted,
    AnyEvent,
    GenerationFinished,
    GenerationResumed,
    GenerationStarted,
    TokensAppended,
    TrajectoryAborted,
    TrajectoryFinished,
    TrajectoryStarted,
)
from belayer.journal.limits import LIMITS, Limits
from belayer.journal.store import JournalStore
from belayer.journal.writer import READ_AGAIN_PAUSE_S, Reader, StreamWriter, take_over
from belayer.observe import steps
from belayer.observe.position import at, say
from belayer.projections.trajectory import Boundary, Generation, TrajectoryState, evolve, fold
from belayer.projections.trajectory_rules import problem_of

CHUNK_TOKENS = 256
CHUNK_S = 0.1
OPENED_S = 120.0
"""How long a recovery is waited for."""


class _Buffer:
    """Tokens of the current generation that are not in the journal yet."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.loss_mask: list[int | bool] = []
        self.weight_version = 0

    def take(self, count: int) -> tuple[bytes, bytes, bytes]:
        """Remove the first `count` tokens and pack them."""
        packed = (
            pack_token_ids(self.token_ids[:count]),
            pack_logprobs(self.logprobs[:count]),
            pack_loss_mask(self.loss_mask[:count]),
        )
        del self.token_ids[:count], self.logprobs[:count], self.loss_mask[:count]
        return packed


class Trajectory:
    """One trajectory under our epoch. Made by `open`; use it in one task at a time."""

    def __init__(self, writer: StreamWriter, state: TrajectoryState, chunk_tokens: int, chunk_s: float) -> None:
        self._writer = writer
        self.state: TrajectoryState = state
        self._chunk_tokens = chunk_tokens
        self._chunk_s = chunk_s
        self._buffer = _Buffer()
        self._lock = asyncio.Lock()
        self._timer: asyncio.Task[None] | None = None
        self._unsettled: tuple[AnyEvent, ...] = ()
        self._refused: LimitError | None = None
        """Why tokens that were generated are not in the journal: nothing but aborting may follow."""

    @classmethod
    async def open(
        cls,
        store: JournalStore,
        name: str,
        *,
        writer: str = "rollout",
        chunk_tokens: int = CHUNK_TOKENS,
        chunk_s: float = CHUNK_S,
        timeout_s: float = OPENED_S,
        limits: Limits = LIMITS,
    ) -> Trajectory:
        """Open a new trajectory or resume one: take its epoch, fencing off whoever wrote it before.

        A trajectory under recovery is waited for, up to `timeout_s`; then TimeoutError.
        """
        if chunk_tokens < 1 or chunk_s <= 0:
            raise InputError(f"a chunk needs at least 1 token and some time; got {chunk_tokens} and {chunk_s} s")
        if chunk_tokens * TOKEN_BYTES > limits.event_bytes / 2:
            raise InputError(f"chunks of {chunk_tokens} tokens do not fit into events of {limits.event_bytes} bytes")
        deadline = time.monotonic() + timeout_s
        stream = trajectory_stream(name)
        with steps.step("open", stream=str(stream)):
            while True:
                reader = Reader(store, stream)
                state = await _until_resumed(reader, deadline, timeout_s)
                if state.sealed_with:
                    raise MissingKeyError(str(stream), state.sealed_with, [])
                try:
                    stream_writer, history = await take_over(store, stream, writer, reader=reader, limits=limits)
                except (WrongSequenceError, DamagedJournalError):
                    if time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(READ_AGAIN_PAUSE_S)  # what was read is gone, by a failover say
                    continue
                state = fold(history, state)
                if state.phase != "recovering":
                    return cls(stream_writer, state, chunk_tokens, chunk_s)

    async def __aenter__(self) -> Trajectory:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
        elif self._timer is not None:
            self._timer.cancel()
            await asyncio.wait([self._timer])

    async def start(self, run: str, task: str, prompt: Iterable[int], labels: Mapping[str, str] | None = None) -> None:
        """Begin the trajectory with its prompt's token ids."""
        if await self._has_settled(TrajectoryStarted):
            return
        await self._append(TrajectoryStarted(run, task, pack_token_ids(prompt), dict(labels or {})))

    async def begin_generation(self, worker: str = "", incarnation: str = "") -> int:
        """Begin a generation, or resume the unfinished one; how many of its tokens are journaled already."""
        await self.flush()
        current = self.state.generation
        if current is None:
            await self._append(GenerationStarted(self.state.generations + 1, worker, incarnation))
            return 0
        offset = self._generation().count
        await self._append(GenerationResumed(current.number, offset, worker, incarnation))
        return offset

    async def append_tokens(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        weight_version: int = 0,
        loss_mask: Sequence[int | bool] | None = None,
    ) -> None:
        """Add n generated tokens: n ids, n logprobs, n mask entries (all 1 when left out).

        What waits since earlier calls is written first; an error of that leaves these tokens out, so the same call may
        be made again. When they are the last, call `finish_generation` next.
        """
        if type(weight_version) is not int:
            raise InputError(f"the weight version must be an int, not {weight_version!r}")
        mask = [1] * len(token_ids) if loss_mask is None else loss_mask
        if not len(token_ids) == len(logprobs) == len(mask):
            raise InputError(
                f"{len(token_ids)} token ids came with {len(logprobs)} logprobs and {len(mask)} mask entries; "
                "they must be equally many"
            )
        self._generation()
        self._raise_timer_error()
        buffer = self._buffer
        if len(buffer.token_ids) >= self._chunk_tokens:
            await self._flush(whole_chunks_only=True)
        if buffer.token_ids and buffer.weight_version != weight_version:
            await self.flush()
        buffer.weight_version = weight_version
        buffer.token_ids += token_ids
        buffer.logprobs += logprobs
        buffer.loss_mask += mask
        if buffer.token_ids and self._timer is None and self._chunk_s < math.inf:
            self._timer = asyncio.create_task(self._flush_later())

    async def finish_generation(self, finish_reason: str) -> None:
        """End the generation. Its last tokens and its end are one append: nobody resumes after a stop token."""
        self._stop_timer()
        async with self._lock:
            if any(isinstance(event, GenerationFinished) for event in await self._settle()):
                return
            while len(self._buffer.token_ids) > self._chunk_tokens:
                await self._append_locked(self._next_chunk())
            last = [self._next_chunk()] if self._buffer.token_ids else []
            current = self._generation()
            count = current.count + sum(chunk.count for chunk in last)
            await self._append_locked(*last, GenerationFinished(current.number, count, finish_reason))

    async def start_action(self, command: str, timeout_s: float, sandbox_incarnation: str) -> int:
        """Record the intent to run an action, before it runs; its number. After a resume: the number in flight.

        FencedError when that action was meant for another incarnation: a recovery has replaced the container since.
        """
        await self._has_settled(ActionStarted)
        if (flying := self.state.action) is not None:
            if flying.sandbox_incarnation != sandbox_incarnation:
                await self._writer.check_epoch()
                raise ProtocolError(
                    f"{self._writer.stream}: action {flying.action} is in flight in {flying.sandbox_incarnation}, "
                    f"not in {sandbox_incarnation}"
                )
            if flying.command != command:
                raise ProtocolError(f"{self._writer.stream}: action {flying.action} is in flight with another command")
            return flying.action
        number = self.state.boundary.number + 1
        await self._append(ActionStarted(number, command, timeout_s, sandbox_incarnation))
        return number

    async def commit_action(
        self,
        exit_status: int,
        observation: Iterable[int],
        observation_digest: bytes,
        duration_s: float,
        timed_out: bool = False,
        dropped_bytes: int = 0,
    ) -> Boundary:
        """Record what the model sees of the action's outcome: the boundary."""
        if await self._has_settled(ActionCommitted):
            return self.state.boundary
        if self.state.action is None:
            raise ProtocolError(f"{self._writer.stream}: no action is in flight")
        await self._append(
            ActionCommitted(
                self.state.action.action,
                exit_status,
                pack_token_ids(observation),
                observation_digest,
                duration_s,
                timed_out,
                dropped_bytes,
            )
        )
        return self.state.boundary

    async def finish(self, reason: str, reward: float | None = None) -> None:
        """The sample is complete. InputError when the reward is no finite number."""
        if isinstance(reward, float) and not math.isfinite(reward):
            raise InputError(f"the reward must be finite, not {reward}; leave it out when there is none")
        if await self._has_settled(TrajectoryFinished):
            return
        await self._append(TrajectoryFinished(reason, reward))

    async def abort(self, reason: str) -> None:
        """Give the trajectory up; its sample will not be trained on."""
        if not await self._has_settled(TrajectoryAborted):
            await self._append(TrajectoryAborted(reason))
        self._refused = None

    async def flush(self) -> None:
        """Return once every token given so far is in the journal."""
        self._stop_timer()
        await self._flush(whole_chunks_only=False)

    async def close(self) -> None:
        """Flush, then let go. The trajectory stays open in the journal for whoever opens it next."""
        await self.flush()

    def _generation(self) -> Generation:
        if self.state.generation is None:
            raise ProtocolError(f"{self._writer.stream}: no generation has begun")
        return self.state.generation

    async def _has_settled(self, kind: type[AnyEvent]) -> bool:
        """Settle what an earlier call left open; whether it was such an event: then the same call is made again."""
        async with self._lock:
            return any(isinstance(event, kind) for event in await self._settle())

    async def _append(self, event: AnyEvent) -> None:
        async with self._lock:
            await self._append_locked(event)

    async def _append_locked(self, *events: AnyEvent) -> None:
        await self._settle()
        if self._refused is not None and not isinstance(events[0], TrajectoryAborted):
            raise self._refused
        state = self.state
        for sequence, event in enumerate(events, state.sequence + 1):
            if not isinstance(event, TokensAppended):  # these are packed, and their version is an int
                check_types(event)
            if problem := problem_of(state, event):
                raise ProtocolError(f"{self._writer.stream}: {problem}")
            state = evolve(state, sequence, event)
        self._unsettled = events
        try:
            await self._writer.append(*events)
        except LimitError as error:
            self._unsettled = ()
            if any(isinstance(event, TokensAppended) for event in events):
                self._refused = error
            raise
        except FencedError as error:
            at(self._writer)
            say("belayer.client", "fenced off; open the trajectory again", current_epoch=error.current_epoch)
            raise
        await self._settle()

    async def _settle(self) -> tuple[AnyEvent, ...]:
        """Bring the state up to an append whose reply was lost before; its events."""
        events = self._unsettled
        if events:
            last = await self._writer.retry()
            for sequence, event in enumerate(events, last - len(events) + 1):
                self.state = evolve(self.state, sequence, event)
            self._unsettled = ()
        return events

    async def _flush(self, whole_chunks_only: bool) -> None:
        async with self._lock:
            await self._settle()
            if self._refused is not None:
                raise self._refused
            while waiting := len(self._buffer.token_ids):
                if whole_chunks_only and waiting < self._chunk_tokens:
                    break
                await self._append_locked(self._next_chunk())

    def _next_chunk(self) -> TokensAppended:
        """Take the next tokens out of the buffer, at most a chunk of them."""
        generation = self._generation()
        count = min(len(self._buffer.token_ids), self._chunk_tokens)
        version = self._buffer.weight_version
        token_ids, logprobs, loss_mask = self._buffer.take(count)
        return TokensAppended(generation.number, generation.count, count, token_ids, logprobs, loss_mask, version)

    async def _flush_later(self) -> None:
        await asyncio.sleep(self._chunk_s)
        await self._flush(whole_chunks_only=False)

    def _raise_timer_error(self) -> None:
        if self._timer is not None and self._timer.done():
            timer, self._timer = self._timer, None
            timer.result()

    def _stop_timer(self) -> None:
        """Take the timer down; an error that it met comes back here, to whoever flushes or closes."""
        timer, self._timer = self._timer, None
        if timer is None:
            return
        if timer.done():
            timer.result()
        else:
            timer.cancel()


async def wait_resumed(store: JournalStore, name: str, timeout_s: float) -> TrajectoryState:
    """The trajectory's state as soon as nobody is recovering it; TimeoutError if that takes too long."""
    return await _until_resumed(Reader(store, trajectory_stream(name)), time.monotonic() + timeout_s, timeout_s)


async def _until_resumed(reader: Reader, deadline: float, timeout_s: float) -> TrajectoryState:
    history = await reader.catch_up()
    with steps.step("fold", stream=str(reader.stream), sequence=reader.sequence):
        state = fold(history)
    while state.phase == "recovering":
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(
                f"{reader.stream} is still under recovery after {timeout_s:.0f} s; is `belayer actors` up?"
            )
        say("belayer.client", "under recovery; waiting for it", left_s=round(left_s, 1))
        await reader.wait(left_s)
        state = fold(await reader.catch_up(), state)
    return state
