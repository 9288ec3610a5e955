"""What `belayer status` knows of each stream: its projection, and when its last event was written.

Streams are read on from where the last look ended. Folds carry no tokens here, so watching a long run stays small.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from belayer.errors import CodecError, DamagedJournalError
from belayer.ids import StreamId, StreamKind
from belayer.journal.codec import Recorded
from belayer.journal.events import EpochStarted, StreamArchived, TokensAppended
from belayer.journal.store import JournalStore, Loss
from belayer.journal.writer import Reader
from belayer.projections import run, sandbox, trajectory, worker

S = TypeVar("S")
_AT_ONCE = 16


class TrajectoryRow(msgspec.Struct, frozen=True):
    """A trajectory and its sandbox. `age_s`: since the newest event of either."""

    trajectory: str
    run: str
    state: str
    epoch: int
    writer: str
    age_s: float
    generation: int
    generating_tokens: int | None
    """Tokens of the unfinished generation; None when none is under way."""
    action: int
    """The action in flight, or 0."""
    boundary: int
    rewinds: int
    checkpoint: str
    """The newest published one; empty: the initial state."""
    checkpoint_boundary: int
    sandbox: str
    sandbox_state: str
    sandbox_failures: int
    checkpoint_left_out: tuple[str, ...] = ()
    """Of a checkpoint of files alone: what it lacks."""
    sandbox_left_out: tuple[str, ...] = ()
    """What the newest recovery did not bring back."""


class EngineRow(msgspec.Struct, frozen=True):
    """One engine incarnation of a worker."""

    worker: str
    incarnation: str
    role: str
    state: str
    weight_version: int
    address: str
    handovers: int
    age_s: float


class RunRow(msgspec.Struct, frozen=True):
    """A run. `durability` is what its journal promises."""

    run: str
    state: str
    host: str
    durability: str
    weight_version: int
    age_s: float


class LossRow(msgspec.Struct, frozen=True):
    """Acknowledged events that a server was found to have lost. `age_s`: since they were missed."""

    stream: str
    epoch: int
    first_sequence: int
    last_sequence: int
    stored_again: bool
    """If not, the stream has gone on without them, or what came before them is missing too."""
    age_s: float


class UnreadableRow(msgspec.Struct, frozen=True):
    """A stream that is damaged, or that a newer Belayer writes; its row is as of the last event that could be read."""

    stream: str
    problem: str


class Snapshot(msgspec.Struct, frozen=True):
    """One look at the journal."""

    runs: list[RunRow]
    trajectories: list[TrajectoryRow]
    engines: list[EngineRow]
    archived: int = 0
    """Trajectories that have ended and are in the archive: not among the others."""
    losses: list[LossRow] = []
    """Oldest first."""
    unreadable: list[UnreadableRow] = []
    others: int = 0
    """Trajectories that were not asked for."""


class _Watched(Generic[S]):
    """One stream's fold, kept up to date."""

    def __init__(
        self, store: JournalStore, stream: StreamId, fold: Callable[[Iterable[Recorded], S], S], state: S
    ) -> None:
        self._reader = Reader(store, stream, from_mark=True)
        self._fold = fold
        self.stream = stream
        self.state = state
        self.last_ns = 0
        self.writer = ""
        self.archived = False

    async def catch_up(self) -> None:
        new = await self._reader.catch_up()
        for recorded in new:
            self.last_ns = recorded.time_ns
            if isinstance(recorded.event, EpochStarted):
                self.writer = recorded.event.writer
            self.archived |= isinstance(recorded.event, StreamArchived)
        self.state = self._fold(map(_without_tokens, new), self.state)

    def age_s(self, now_ns: int) -> float:
        return max(0.0, (now_ns - self.last_ns) / 1e9)


def _without_tokens(recorded: Recorded) -> Recorded:
    if not isinstance(recorded.event, TokensAppended):
        return recorded
    return recorded._replace(event=replace(recorded.event, token_ids=b"", logprobs=b"", loss_mask=b""))


class Board:
    """All streams of a journal, watched. `run`, `states`: which trajectories are told of; all when not given."""

    def __init__(self, store: JournalStore, run: str | None = None, states: Sequence[str] = ()) -> None:
        self._store = store
        self._only_run, self._states = run, states
        self._trajectories: dict[str, _Watched[trajectory.TrajectoryState]] = {}
        self._sandboxes: dict[str, _Watched[sandbox.SandboxState]] = {}
        self._workers: dict[str, _Watched[worker.WorkerState]] = {}
        self._runs: dict[str, _Watched[run.RunState]] = {}
        self._unreadable: dict[StreamId, str] = {}

    async def look(self, now_ns: int) -> Snapshot:
        """The journal as it is now; ages are counted from `now_ns`."""
        await self._catch_up()
        there = [(name, watched) for name, watched in self._trajectories.items() if not watched.archived]
        wanted = [(name, watched) for name, watched in there if self._wanted(watched.state)]
        return Snapshot(
            runs=[_run_row(watched, now_ns) for watched in self._runs.values()],
            trajectories=[_trajectory_row(watched, self._sandboxes.get(name), now_ns) for name, watched in wanted],
            engines=[row for watched in self._workers.values() for row in _engine_rows(watched, now_ns)],
            archived=sum(watched.archived for watched in self._trajectories.values()),
            losses=[_loss_row(loss, now_ns) for loss in await self._store.losses()],
            unreadable=[UnreadableRow(str(stream), self._unreadable[stream]) for stream in sorted(self._unreadable)],
            others=len(there) - len(wanted),
        )

    def _wanted(self, state: trajectory.TrajectoryState) -> bool:
        return self._only_run in (None, state.run) and (not self._states or state.phase in self._states)

    async def _catch_up(self) -> None:
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one(stream: StreamId) -> None:
            async with limit:
                try:
                    await self._watched(stream).catch_up()
                except (CodecError, DamagedJournalError) as error:
                    self._unreadable[stream] = str(error)

        self._unreadable.clear()
        await asyncio.gather(*map(one, await self._store.streams()))

    def _watched(self, stream: StreamId) -> _Watched[Any]:
        store, name = self._store, stream.name
        match stream.kind:
            case StreamKind.TRAJECTORY:
                new = _Watched(store, stream, trajectory.fold, trajectory.EMPTY)
                return self._trajectories.setdefault(name, new)
            case StreamKind.SANDBOX:
                return self._sandboxes.setdefault(name, _Watched(store, stream, sandbox.fold, sandbox.EMPTY))
            case StreamKind.WORKER:
                return self._workers.setdefault(name, _Watched(store, stream, worker.fold, worker.EMPTY))
            case StreamKind.RUN:
                return self._runs.setdefault(name, _Watched(store, stream, run.fold, run.EMPTY))


def _trajectory_row(
    watched: _Watched[trajectory.TrajectoryState], box: _Watched[sandbox.SandboxState] | None, now_ns: int
) -> TrajectoryRow:
    state = watched.state
    container = box.state if box is not None else sandbox.EMPTY
    newest = container.held[-1] if container.held else ("", trajectory.INITIAL)
    ages = [watched.age_s(now_ns)] + ([box.age_s(now_ns)] if box is not None else [])
    return TrajectoryRow(
        trajectory=watched.stream.name,
        run=state.run,
        state=state.phase,
        epoch=state.epoch,
        writer=watched.writer,
        age_s=round(min(ages), 1),
        generation=state.generations if state.generation is None else state.generation.number,
        generating_tokens=None if state.generation is None else state.generation.count,
        action=0 if state.action is None else state.action.action,
        boundary=state.boundary.number,
        rewinds=state.rewinds,
        checkpoint=newest[0],
        checkpoint_boundary=newest[1].number,
        sandbox=container.incarnation,
        sandbox_state=container.phase,
        sandbox_failures=container.failures,
        checkpoint_left_out=tuple(one.what for one in container.published[newest[0]].left_out) if newest[0] else (),
        sandbox_left_out=tuple(one.what for one in state.left_out),
    )


def _engine_rows(watched: _Watched[worker.WorkerState], now_ns: int) -> list[EngineRow]:
    """The engines that are not removed, the main first. An excluded worker's last main stays, to say so."""
    state = watched.state
    excluded = state.main if state.excluded else ""
    rows = [
        EngineRow(
            worker=watched.stream.name,
            incarnation=incarnation,
            role="main" if incarnation == state.main else "shadow" if engine.status != "failed" else "former",
            state="excluded"
            if incarnation == excluded
            else "recovering"
            if incarnation == state.main and state.recovering
            else "draining"
            if engine.draining and engine.status == "ready"
            else engine.status,
            weight_version=engine.weight_version,
            address=engine.registered.address,
            handovers=state.handovers,
            age_s=round(watched.age_s(now_ns), 1),
        )
        for incarnation, engine in state.engines.items()
        if engine.status != "removed" or incarnation == excluded
    ]
    return sorted(rows, key=lambda row: ("main", "shadow", "former").index(row.role))


def _run_row(watched: _Watched[run.RunState], now_ns: int) -> RunRow:
    state = watched.state
    phase = "empty" if state.started is None else "finished" if state.finished else "going on"
    return RunRow(
        run=watched.stream.name,
        state=phase,
        host="" if state.started is None else state.started.host,
        durability="" if state.started is None else state.started.durability,
        weight_version=state.weight_version,
        age_s=round(watched.age_s(now_ns), 1),
    )


def _loss_row(loss: Loss, now_ns: int) -> LossRow:
    return LossRow(
        stream=str(loss.stream),
        epoch=loss.epoch,
        first_sequence=loss.first_sequence,
        last_sequence=loss.last_sequence,
        stored_again=loss.restored,
        age_s=round(max(0.0, (now_ns - loss.time_ns) / 1e9), 1),
    )
