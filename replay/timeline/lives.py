"""The part of a story that sandboxes and engines tell: incarnations, checkpoints, failures and recoveries."""

from __future__ import annotations

from typing import Literal

from belayer.journal.codec import Recorded
from belayer.journal.events import (
    CheckpointDiscarded,
    CheckpointExtended,
    CheckpointPublished,
    CheckpointStarted,
    FailureDetected,
    HandoverCompleted,
    RecoveryStarted,
    SandboxCreated,
    SandboxRemoved,
    SandboxRestored,
    WorkerReady,
    WorkerRegistered,
    WorkerRemoved,
)
from belayer.projections.trajectory import Boundary
from replay.timeline.model import Checkpoint, Incident, Life, Recovery, Story


class Lives:
    """Writes incarnations, checkpoints and incidents into the story."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._lives: dict[str, Life] = {}
        self._checkpoints: dict[str, Checkpoint] = {}
        self._sandbox_incident: Incident | None = None
        self._engine_incident: Incident | None = None

    def take_sandbox(self, recorded: Recorded) -> None:
        """The next event of the sandbox's stream."""
        event, now_ns = recorded.event, recorded.time_ns
        match event:
            case SandboxCreated():
                self._begin("sandbox", event.incarnation, now_ns)
            case SandboxRestored():
                self._begin("sandbox", event.incarnation, now_ns)
                self._restored(event, now_ns)
            case FailureDetected():
                self._end(event.incarnation, "failed", now_ns)
                self._sandbox_incident = self._incident("sandbox", event, now_ns)
            case RecoveryStarted() if self._sandbox_incident is not None:
                self._started(self._sandbox_incident, now_ns)
            case CheckpointStarted():
                boundary = Boundary(event.boundary, event.boundary_sequence)
                checkpoint = Checkpoint(event.checkpoint, boundary, event.incarnation, now_ns)
                self._checkpoints[event.checkpoint] = checkpoint
                self._story.checkpoints.append(checkpoint)
            case CheckpointPublished() if event.checkpoint in self._checkpoints:
                checkpoint = self._checkpoints[event.checkpoint]
                checkpoint.end_ns, checkpoint.state, checkpoint.was_published = now_ns, "published", True
                checkpoint.size_bytes, checkpoint.frozen_s = event.size_bytes, event.frozen_s
                checkpoint.total_s, checkpoint.stored_bytes = event.total_s, event.stored_bytes
                checkpoint.not_captured, checkpoint.left_out = event.not_captured, event.left_out
            case CheckpointExtended() if event.begun in self._checkpoints:
                checkpoint = self._checkpoints[event.begun]
                checkpoint.end_ns, checkpoint.state, checkpoint.held_by = now_ns, "extended", event.checkpoint
                checkpoint.frozen_s, checkpoint.total_s = event.frozen_s, event.total_s
            case CheckpointDiscarded() if event.checkpoint in self._checkpoints:
                checkpoint = self._checkpoints[event.checkpoint]
                checkpoint.end_ns = checkpoint.end_ns or now_ns
                checkpoint.state, checkpoint.reason = "discarded", event.reason
            case SandboxRemoved():
                self._end(event.incarnation, "removed", now_ns)
            case _:
                pass

    def take_engine(self, recorded: Recorded, in_use: str) -> None:
        """The next event of a worker's stream; `in_use` is the incarnation that generates for the trajectory now."""
        event, now_ns = recorded.event, recorded.time_ns
        match event:
            case WorkerRegistered():
                self._begin("engine", event.incarnation, now_ns).serving_ns = now_ns if event.role == "main" else None
            case FailureDetected() if event.incarnation in self._lives:
                life = self._lives[event.incarnation]
                served = life.serving_ns is not None
                self._end(event.incarnation, "failed", now_ns)
                if served:
                    self._engine_incident = self._incident("engine", event, now_ns)
                    self._engine_incident.hit = event.incarnation == in_use
            case RecoveryStarted() if self._engine_incident is not None:
                self._started(self._engine_incident, now_ns)
                self._engine_incident.plan = event.plan
            case HandoverCompleted():
                if event.to_incarnation in self._lives:
                    self._lives[event.to_incarnation].serving_ns = now_ns
                if self._engine_incident is not None:
                    self._engine_incident.phases_s = event.phases_s
                    self._engine_incident.adopted_tokens = event.adopted_tokens
                self._engine_ready(event.to_incarnation, now_ns)
            case WorkerReady():
                life = self._lives.get(event.incarnation)
                if life is not None and life.serving_ns is not None:
                    self._engine_ready(event.incarnation, now_ns)
            case WorkerRemoved():
                self._end(event.incarnation, "removed", now_ns)
            case _:
                pass

    def planned(self, event: FailureDetected | RecoveryStarted) -> None:
        """What the trajectory's own stream says of the recovery: the plan, in words."""
        if isinstance(event, RecoveryStarted) and self._sandbox_incident is not None:
            self._sandbox_incident.plan = event.plan

    def rewinding(self, to: Boundary, reason: str) -> Incident:
        """The incident for which the trajectory is rewound; one that no failure announced is made up for it."""
        incident = self._sandbox_incident
        if incident is None:
            incident = Incident(0, "rewind", "", "rewound", reason, self._story.end_ns, "")
            self._story.items.append(incident)
            self._overcome(incident, self._story.end_ns)
        incident.rewound_to = to
        return incident

    def resumed(self, incarnation: str, now_ns: int) -> None:
        """The trajectory goes on in that sandbox."""
        if self._sandbox_incident is not None:
            self._overcome(self._sandbox_incident, now_ns)
            self._sandbox_incident.successor = incarnation
            self._sandbox_incident = None

    def engine_resumed(self, incarnation: str, now_ns: int) -> None:
        """The trajectory generates, or generates again, on that engine."""
        incident = self._engine_incident
        if incident is not None and incident.hit and incarnation != incident.incarnation:
            self._overcome(incident, now_ns)

    def _overcome(self, incident: Incident, now_ns: int) -> None:
        if incident.resumed_ns is None:
            incident.resumed_ns = now_ns
            self._story.items.append(Recovery(now_ns, incident))

    def _begin(self, kind: Literal["sandbox", "engine"], incarnation: str, now_ns: int) -> Life:
        life = self._lives[incarnation] = Life(kind, incarnation, now_ns, serving_ns=now_ns)
        self._story.lives.append(life)
        return life

    def _end(self, incarnation: str, how: Literal["failed", "removed"], now_ns: int) -> None:
        life = self._lives.get(incarnation)
        if life is not None and life.end_ns is None:
            life.end_ns, life.end = now_ns, how

    def _incident(self, kind: Literal["sandbox", "engine"], event: FailureDetected, now_ns: int) -> Incident:
        incident = Incident(0, kind, event.incarnation, event.kind, event.evidence, now_ns, event.detected_by)
        self._story.items.append(incident)
        return incident

    def _started(self, incident: Incident, now_ns: int) -> None:
        incident.started_ns = incident.started_ns or now_ns
        incident.attempts += 1

    def _restored(self, event: SandboxRestored, now_ns: int) -> None:
        at = Boundary(event.boundary, event.boundary_sequence)
        for checkpoint in self._story.checkpoints:
            if checkpoint.boundary == at and event.checkpoint in (checkpoint.name, checkpoint.held_by):
                checkpoint.restored += 1
        if self._sandbox_incident is not None:
            self._sandbox_incident.ready_ns = now_ns
            self._sandbox_incident.successor = event.incarnation
            self._sandbox_incident.checkpoint = event.checkpoint
            self._sandbox_incident.left_out = event.left_out

    def _engine_ready(self, incarnation: str, now_ns: int) -> None:
        incident = self._engine_incident
        if incident is not None and incident.ready_ns is None:
            incident.ready_ns, incident.successor = now_ns, incarnation
