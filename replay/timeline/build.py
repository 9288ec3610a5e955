"""Makes a `Story` from the events of a trajectory's stream, its sandbox's and its engines'.

The streams are merged by the time in their events, each keeping its own order. Total: whatever the events are, a story
comes out; whether they hang together is the audit's business.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence

from belayer.ids import StreamId, StreamKind
from belayer.journal.codec import Recorded
from belayer.journal.columns import TOKEN_ID_BYTES
from belayer.journal.events import (
    ActionCommitted,
    ActionStarted,
    FailureDetected,
    GenerationFinished,
    GenerationResumed,
    GenerationStarted,
    RecoveryStarted,
    Rewound,
    TokensAppended,
    TrajectoryAborted,
    TrajectoryFinished,
    TrajectoryResumed,
    TrajectoryStarted,
)
from belayer.projections.trajectory import Boundary
from replay.timeline.lives import Lives
from replay.timeline.model import Action, Generation, Incident, Note, Story


def build(name: str, streams: Mapping[StreamId, Sequence[Recorded]]) -> Story:
    """The story that the streams tell: the trajectory's, and of the others what happened in its lifetime."""
    builder = _Builder(name)
    for recorded in _merged(streams.values()):
        builder.take(recorded)
    return builder.finished()


def _merged(streams: Iterable[Sequence[Recorded]]) -> Iterator[Recorded]:
    """All events by time; a clock that jumps back does not change the order within a stream."""

    def timed(place: int, events: Sequence[Recorded]) -> Iterator[tuple[int, int, int, Recorded]]:
        latest = 0
        for recorded in events:
            latest = max(latest, recorded.time_ns)
            yield latest, place, recorded.sequence, recorded

    merged = heapq.merge(*(timed(place, events) for place, events in enumerate(streams)), key=lambda item: item[:3])
    return (recorded for _, _, _, recorded in merged)


class _Builder:
    def __init__(self, name: str) -> None:
        self.story = Story(name)
        self._lives = Lives(self.story)
        self._generation: Generation | None = None
        self._action: Action | None = None
        self._sandbox_ns = 0

    def take(self, recorded: Recorded) -> None:
        self.story.events += 1
        match recorded.stream.kind:
            case StreamKind.TRAJECTORY:
                self.story.end_ns = max(self.story.end_ns, recorded.time_ns)
                self._take_trajectory(recorded)
            case StreamKind.SANDBOX:
                self._sandbox_ns = max(self._sandbox_ns, recorded.time_ns)
                self._lives.take_sandbox(recorded)
            case StreamKind.WORKER:
                self._lives.take_engine(recorded, self._engine_in_use())
            case StreamKind.RUN:
                pass

    def finished(self) -> Story:
        """The story, without the engines that came and went outside the trajectory's time."""
        story = self.story
        if story.ending not in ("finished", "aborted"):
            story.end_ns = max(story.end_ns, self._sandbox_ns)
        story.lives = [
            life
            for life in story.lives
            if life.start_ns <= story.end_ns and (life.end_ns is None or life.end_ns >= story.start_ns)
        ]
        story.items = [
            item
            for item in story.items
            if not isinstance(item, Incident) or story.start_ns <= item.detected_ns <= story.end_ns
        ]
        for number, incident in enumerate(story.incidents, 1):
            incident.number = number
        by_boundary = {checkpoint.boundary.sequence: checkpoint for checkpoint in story.checkpoints if checkpoint.holds}
        for action in story.actions:
            action.checkpoint = by_boundary.get(action.boundary_sequence)
        return story

    def _engine_in_use(self) -> str:
        return self._generation.engines[-1][2] if self._generation is not None and self._generation.engines else ""

    def _take_trajectory(self, recorded: Recorded) -> None:
        event, now_ns, sequence, story = recorded.event, recorded.time_ns, recorded.sequence, self.story
        match event:
            case TrajectoryStarted():
                story.run, story.task, story.start_ns = event.run, event.task, now_ns
                story.prompt_tokens = len(event.prompt) // TOKEN_ID_BYTES
                story.items.append(Note(sequence, now_ns, "started"))
            case GenerationStarted():
                engines = [(now_ns, 0, event.incarnation)]
                self._generation = Generation(sequence, event.generation, now_ns, engines)
                story.items.append(self._generation)
                self._lives.engine_resumed(event.incarnation, now_ns)
            case GenerationResumed() if self._generation is not None:
                self._generation.engines.append((now_ns, event.offset, event.incarnation))
                self._lives.engine_resumed(event.incarnation, now_ns)
            case TokensAppended() if self._generation is not None:
                self._generation.tokens = event.offset + event.count
                self._generation.chunks += 1
            case GenerationFinished() if self._generation is not None:
                self._generation.end_ns, self._generation = now_ns, None
            case ActionStarted():
                self._action = Action(sequence, event.action, event.command, event.sandbox_incarnation, now_ns)
                story.items.append(self._action)
            case ActionCommitted() if self._action is not None:
                self._commit(self._action, event, sequence, now_ns)
            case FailureDetected() | RecoveryStarted():
                story.ending = "under recovery" if isinstance(event, RecoveryStarted) else story.ending
                self._lives.planned(event)
            case Rewound():
                self._rewind(event)
            case TrajectoryResumed():
                story.ending = "going on"
                self._lives.resumed(event.sandbox_incarnation, now_ns)
            case TrajectoryFinished():
                story.ending, story.reason, story.reward = "finished", event.reason, event.reward
                story.items.append(Note(sequence, now_ns, f"finished: {event.reason}"))
            case TrajectoryAborted():
                story.ending, story.reason = "aborted", event.reason
                story.items.append(Note(sequence, now_ns, f"aborted: {event.reason}"))
            case _:
                pass

    def _commit(self, action: Action, event: ActionCommitted, sequence: int, now_ns: int) -> None:
        action.end_ns, action.boundary_sequence = now_ns, sequence
        action.exit_status, action.duration_s, action.timed_out = event.exit_status, event.duration_s, event.timed_out
        action.observation_tokens = len(event.observation) // TOKEN_ID_BYTES
        self._action = None

    def _rewind(self, event: Rewound) -> None:
        """Everything that began after the boundary and still counted is superseded by the incident under way."""
        incident = self._lives.rewinding(Boundary(event.to_boundary, event.to_sequence), event.reason)
        for item in self.story.items:
            if isinstance(item, Generation | Action) and item.sequence > event.to_sequence:
                if item.superseded_by is not None:
                    continue
                item.superseded_by = incident
                if isinstance(item, Generation):
                    incident.tokens_again += item.tokens
                else:
                    incident.actions_again += 1
        self._generation = self._action = None
