"""The trajectory's fold: what counts after every rewind.

The live prefix is the prompt, then segments: generations and the actions that followed them. A rewind cuts the segments
after its boundary; nothing else ever removes one. `evolve` is pure and total: it never fails, also on a history that
`trajectory_rules.problem_of` objects to, so that an audit can go on past a finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from belayer.errors import MissingKeyError, ProtocolError
from belayer.journal.codec import Recorded
from belayer.journal.columns import unpack_logprobs, unpack_token_ids
from belayer.journal.events import (
    ActionCommitted,
    ActionStarted,
    AnyEvent,
    EpochStarted,
    GenerationFinished,
    GenerationResumed,
    GenerationStarted,
    LeftOut,
    RecoveryStarted,
    Rewound,
    Sealed,
    TokensAppended,
    TrajectoryAborted,
    TrajectoryFinished,
    TrajectoryResumed,
    TrajectoryStarted,
    readable,
)

Phase = Literal["empty", "open", "recovering", "finished", "aborted"]


class Boundary(NamedTuple):
    """A committed point: the action's number on its branch and its ActionCommitted's sequence."""

    number: int
    sequence: int


INITIAL = Boundary(0, 0)
"""The state before any action; it is a checkpoint too."""


class Generation(msgspec.Struct, frozen=True):
    """The tokens of one model response, as far as they are journaled."""

    number: int
    worker: str
    incarnation: str
    count: int = 0
    chunks: tuple[TokensAppended, ...] = ()
    finish_reason: str | None = None

    def token_ids(self) -> list[int]:
        """`count` token ids. ProtocolError when they are sealed and were not opened."""
        if self.count and not any(chunk.token_ids for chunk in self.chunks):
            raise ProtocolError("the generation's tokens are sealed; open the journal with its encryption keys")
        return unpack_token_ids(b"".join(chunk.token_ids for chunk in self.chunks))

    def logprobs(self) -> list[float]:
        """`count` logprobs."""
        return unpack_logprobs(b"".join(chunk.logprobs for chunk in self.chunks))

    def loss_mask(self) -> bytes:
        """`count` bytes, 0 or 1."""
        return b"".join(chunk.loss_mask for chunk in self.chunks)


class Step(msgspec.Struct, frozen=True):
    """One action of the live branch and what came of it."""

    started: ActionStarted
    committed: ActionCommitted
    boundary: Boundary


Segment = Generation | Step


class TrajectoryState(msgspec.Struct, frozen=True):
    """Everything that a rollout needs to go on from where the journal ends."""

    phase: Phase = "empty"
    run: str = ""
    task: str = ""
    labels: dict[str, str] = {}
    prompt: bytes = b""
    segments: tuple[Segment, ...] = ()
    generation: Generation | None = None
    """The unfinished generation, if one is."""
    action: ActionStarted | None = None
    """The action without an outcome, if there is one."""
    boundaries: tuple[Boundary, ...] = (INITIAL,)
    """Committed points of the live branch, oldest first."""
    epoch: int = 0
    sequence: int = 0
    rewinds: int = 0
    sandbox_incarnation: str = ""
    left_out: tuple[LeftOut, ...] = ()
    """What the newest recovery of the sandbox did not bring back of its boundary (decision 15)."""
    reason: str = ""
    reward: float | None = None
    sealed_with: str = ""
    """The key without which payloads are empty here; empty when all payloads are."""

    @property
    def boundary(self) -> Boundary:
        """The newest committed point of the live branch."""
        return self.boundaries[-1]

    @property
    def generations(self) -> int:
        """How many generations the live branch has finished: its segments but for the steps, one for each boundary."""
        return len(self.segments) - (len(self.boundaries) - 1)

    @property
    def steps(self) -> Iterator[Step]:
        """The actions of the live branch."""
        return (segment for segment in self.segments if isinstance(segment, Step))

    def context(self) -> list[int]:
        """Token ids of the live prefix: prompt, generations and observations in order, the unfinished one included."""
        if self.sealed_with:
            raise MissingKeyError("the trajectory", self.sealed_with, [])
        packed = [self.prompt]
        for segment in self.segments:
            match segment:
                case Generation():
                    packed += [chunk.token_ids for chunk in segment.chunks]
                case Step():
                    packed.append(segment.committed.observation)
        if self.generation is not None:
            packed += [chunk.token_ids for chunk in self.generation.chunks]
        return unpack_token_ids(b"".join(packed))


EMPTY = TrajectoryState()


def fold(history: Iterable[Recorded], state: TrajectoryState = EMPTY) -> TrajectoryState:
    """The state after `history`."""
    for recorded in history:
        state = evolve(state, recorded.sequence, recorded.event)
    return state


def outline(history: Iterable[Recorded], state: TrajectoryState = EMPTY) -> TrajectoryState:
    """The same without what is said and run: no segments, no tokens, no commands. For actors, who keep thousands warm.

    Phase, boundaries and what is in flight are those of `fold`.
    """
    for recorded in history:
        event = readable(recorded.event)
        match event:
            case TrajectoryStarted():
                event = replace(event, prompt=b"")
            case ActionStarted():
                event = replace(event, command="")
            case _:
                pass
        state = replace(evolve(state, recorded.sequence, event), segments=())
        if state.generation is not None and state.generation.chunks:
            state = replace(state, generation=replace(state.generation, chunks=()))
    return state


def evolve(state: TrajectoryState, sequence: int, event: AnyEvent) -> TrajectoryState:
    """The state after one more event. Events of other kinds of stream change nothing but the sequence."""
    match event:
        case TokensAppended():
            if state.generation is None:
                return replace(state, sequence=sequence)
            generation = replace(
                state.generation,
                count=event.offset + event.count,
                chunks=(*state.generation.chunks, event),
            )
            return replace(state, sequence=sequence, generation=generation)
        case GenerationStarted():
            return replace(
                state,
                sequence=sequence,
                generation=Generation(event.generation, event.worker, event.incarnation),
            )
        case GenerationResumed():
            if state.generation is None:
                return replace(state, sequence=sequence)
            resumed = replace(state.generation, worker=event.worker, incarnation=event.incarnation)
            return replace(state, sequence=sequence, generation=resumed)
        case GenerationFinished():
            if state.generation is None:
                return replace(state, sequence=sequence)
            finished = replace(state.generation, finish_reason=event.finish_reason)
            return replace(state, sequence=sequence, segments=(*state.segments, finished), generation=None)
        case ActionStarted():
            return replace(state, sequence=sequence, action=event)
        case ActionCommitted():
            if state.action is None:
                return replace(state, sequence=sequence)
            boundary = Boundary(event.action, sequence)
            return replace(
                state,
                sequence=sequence,
                segments=(*state.segments, Step(state.action, event, boundary)),
                action=None,
                boundaries=(*state.boundaries, boundary),
            )
        case Rewound():
            return _rewind(state, sequence, Boundary(event.to_boundary, event.to_sequence))
        case TrajectoryStarted():
            return replace(
                state,
                phase="open",
                sequence=sequence,
                run=event.run,
                task=event.task,
                labels=event.labels,
                prompt=event.prompt,
            )
        case RecoveryStarted():
            return replace(state, phase="recovering" if state.phase == "open" else state.phase, sequence=sequence)
        case TrajectoryResumed():
            phase: Phase = "open" if state.phase == "recovering" else state.phase
            box = event.sandbox_incarnation
            return replace(state, phase=phase, sequence=sequence, sandbox_incarnation=box, left_out=event.left_out)
        case TrajectoryFinished():
            return replace(state, phase="finished", sequence=sequence, reason=event.reason, reward=event.reward)
        case TrajectoryAborted():
            return replace(state, phase="aborted", sequence=sequence, reason=event.reason)
        case EpochStarted():
            return replace(state, sequence=sequence, epoch=event.epoch)
        case Sealed():
            return replace(evolve(state, sequence, event.event), sealed_with=event.key)
        case _:
            return replace(state, sequence=sequence)


def _rewind(state: TrajectoryState, sequence: int, to: Boundary) -> TrajectoryState:
    kept = tuple(boundary for boundary in state.boundaries if boundary.sequence <= to.sequence)
    segments = state.segments
    while segments and not (isinstance(segments[-1], Step) and segments[-1].boundary.sequence <= to.sequence):
        segments = segments[:-1]
    return replace(
        state,
        sequence=sequence,
        segments=segments,
        boundaries=kept or (INITIAL,),
        generation=None,
        action=None,
        rewinds=state.rewinds + 1,
    )
