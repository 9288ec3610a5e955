"""What happened to one trajectory, as things with a beginning and an end instead of events. Pure data, free of tokens.

Times are the writers' wall clocks in nanoseconds, as the events carry them: good for looking at, never for judging.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from belayer.journal.events import LeftOut
from belayer.projections.trajectory import Boundary

Ending = Literal["going on", "finished", "aborted", "under recovery"]


@dataclass
class Generation:
    """A model response. `engines`: which incarnation generated from which token on. No end: unfinished."""

    sequence: int
    number: int
    start_ns: int
    engines: list[tuple[int, int, str]] = field(default_factory=list[tuple[int, int, str]])
    """(time, offset in tokens, incarnation)."""
    tokens: int = 0
    chunks: int = 0
    end_ns: int | None = None
    superseded_by: Incident | None = None


@dataclass
class Action:
    """A command in the sandbox. No end: its outcome never came."""

    sequence: int
    number: int
    command: str
    sandbox: str
    start_ns: int
    end_ns: int | None = None
    boundary_sequence: int = 0
    exit_status: int = 0
    duration_s: float = 0.0
    timed_out: bool = False
    observation_tokens: int = 0
    superseded_by: Incident | None = None
    checkpoint: Checkpoint | None = None
    """What holds the boundary after it, if a checkpoint ever did."""


@dataclass
class Checkpoint:
    """A checkpoint. `state` is what its stream says last of it before the sandbox was removed."""

    name: str
    boundary: Boundary
    sandbox: str
    start_ns: int
    end_ns: int | None = None
    state: Literal["open", "published", "extended", "discarded"] = "open"
    """`extended`: it was not needed, for `held_by` holds its boundary too."""
    was_published: bool = False
    held_by: str = ""
    size_bytes: int = 0
    stored_bytes: int = 0
    """What it added to the disk; 0 when an older version wrote the event."""
    not_captured: tuple[str, ...] = ()
    """Mount points whose contents are not in it."""
    left_out: tuple[LeftOut, ...] = ()
    """Not empty: it holds the files alone."""
    frozen_s: float = 0.0
    total_s: float = 0.0
    reason: str = ""
    restored: int = 0
    """How often the boundary was restored."""

    @property
    def holds(self) -> bool:
        """Whether the boundary was ever held by a checkpoint, this one or an earlier one."""
        return self.was_published or bool(self.held_by)


@dataclass
class Life:
    """One incarnation of a sandbox or an engine. No end: it lives on."""

    kind: Literal["sandbox", "engine"]
    incarnation: str
    start_ns: int
    serving_ns: int | None = None
    """When it began to serve: an engine armed as a shadow waits for that."""
    end_ns: int | None = None
    end: Literal["", "failed", "removed"] = ""


@dataclass
class Incident:
    """A failure and how it was overcome. Phases that did not happen (yet) have no time."""

    number: int
    kind: Literal["sandbox", "engine", "rewind"]
    """`rewind`: nothing failed, the trajectory was rewound on purpose (other weights, say)."""
    incarnation: str
    failure: str
    evidence: str
    detected_ns: int
    detected_by: str
    started_ns: int | None = None
    attempts: int = 0
    """How often a recovery was started: more than once when the one before had died."""
    plan: str = ""
    ready_ns: int | None = None
    successor: str = ""
    phases_s: dict[str, float] = field(default_factory=dict[str, float])
    """An engine's handover, phase by phase, where its host measured them."""
    adopted_tokens: int = 0
    checkpoint: str | None = None
    left_out: tuple[LeftOut, ...] = ()
    """What the restore did not bring back, for the checkpoint does not hold it."""
    resumed_ns: int | None = None
    rewound_to: Boundary | None = None
    tokens_again: int = 0
    actions_again: int = 0
    hit: bool = True
    """Whether it interrupted this trajectory (an engine may die while the trajectory does not use it)."""

    @property
    def outage_s(self) -> float | None:
        """From detection to the trajectory going on."""
        return None if self.resumed_ns is None else (self.resumed_ns - self.detected_ns) / 1e9


@dataclass
class Recovery:
    """The moment at which an incident was overcome."""

    time_ns: int
    incident: Incident


@dataclass
class Note:
    """Something that has only a moment: the trajectory's start and end, a change of weights."""

    sequence: int
    time_ns: int
    text: str


Item = Generation | Action | Incident | Recovery | Note


@dataclass
class Story:
    """Everything about one trajectory. `items` are in the order in which they began."""

    name: str
    run: str = ""
    task: str = ""
    prompt_tokens: int = 0
    ending: Ending = "going on"
    reason: str = ""
    reward: float | None = None
    start_ns: int = 0
    end_ns: int = 0
    items: list[Item] = field(default_factory=list[Item])
    checkpoints: list[Checkpoint] = field(default_factory=list[Checkpoint])
    lives: list[Life] = field(default_factory=list[Life])
    events: int = 0
    findings: int = 0
    """What the audit found in these streams."""
    sealed_with: list[str] = field(default_factory=list[str])
    """Keys that are not here: what they seal (prompt, commands, observations) is empty."""

    @property
    def generations(self) -> list[Generation]:
        return [item for item in self.items if isinstance(item, Generation)]

    @property
    def actions(self) -> list[Action]:
        return [item for item in self.items if isinstance(item, Action)]

    @property
    def incidents(self) -> list[Incident]:
        return [item for item in self.items if isinstance(item, Incident)]

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9
