"""What one stream's audit leaves behind for the checks between streams: small, and free of tokens."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from belayer.journal.events import LeftOut
from belayer.projections.trajectory import Boundary
from replay.boundaries import BoundaryIndex


class Resumption(NamedTuple):
    """At `sequence` of the trajectory it began, or went on, in that incarnation standing at that boundary."""

    sequence: int
    boundary: Boundary
    incarnation: str
    left_out: tuple[LeftOut, ...] = ()


def names(left_out: tuple[LeftOut, ...]) -> str:
    """What a checkpoint or an environment lacks, in a few words."""
    return ", ".join(f"{one.what} (pid {one.pid})" if one.pid else one.what for one in left_out) or "nothing"


class TrajectoryFacts(msgspec.Struct, frozen=True):
    """`recovery_at`: where a recovery that is still open was started, else 0. `engines`: first use of each."""

    run: str
    boundaries: BoundaryIndex
    resumptions: list[Resumption]
    engines: dict[tuple[str, str], int]
    sequence: int
    whole: bool
    ended: bool
    recovery_at: int


class Container(NamedTuple):
    """An incarnation of a sandbox, made at `sequence` of its stream and standing at `boundary`.

    `unproven`: it was restored, and whether that boundary counted is for the trajectory's stream to say.
    """

    sequence: int
    incarnation: str
    boundary: Boundary
    left_out: tuple[LeftOut, ...]
    unproven: bool


class Capture(NamedTuple):
    """The intent to capture a boundary of an incarnation."""

    sequence: int
    checkpoint: str
    incarnation: str
    boundary: Boundary


class SandboxFacts(msgspec.Struct, frozen=True):
    """A sandbox's incarnations and checkpoints in order."""

    run: str
    containers: list[Container]
    captures: list[Capture]
    whole: bool
    removed: bool
    recovery_at: int


class WorkerFacts(msgspec.Struct, frozen=True):
    """Which engine incarnations a worker ever had."""

    run: str
    incarnations: frozenset[str]
    whole: bool
    recovery_at: int


class RunFacts(msgspec.Struct, frozen=True):
    """Whether the rollout is over."""

    finished: bool
    whole: bool


Facts = TrajectoryFacts | SandboxFacts | WorkerFacts | RunFacts
