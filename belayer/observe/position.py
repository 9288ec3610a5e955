"""Where in the journal a task is at work, for the log lines that it writes: trajectory, epoch and sequence.

Whoever reads a stream or takes it over is at work on it, in this task and those that it starts, until the next one.
`position()` is asked when a line is written, so a line shows the newest sequence, and nothing is computed for lines
that nobody writes.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from belayer.ids import StreamId


class Place(Protocol):
    """A reader or a writer of a stream."""

    @property
    def stream(self) -> StreamId: ...
    @property
    def epoch(self) -> int: ...
    @property
    def sequence(self) -> int: ...


class Beginning(NamedTuple):
    """The place of someone who was told to look at a stream and has read nothing of it yet."""

    stream: StreamId
    epoch: int = 0
    sequence: int = 0


_place: ContextVar[Place | None] = ContextVar("belayer_place", default=None)


def at(place: Place) -> None:
    """From here on this task works there."""
    if _place.get() is not place:
        _place.set(place)


def position() -> dict[str, str | int]:
    """`trajectory` (the entity's name), `stream`, `epoch` and `sequence`; empty for work on no stream."""
    if (place := _place.get()) is None:
        return {}
    return {
        "trajectory": place.stream.name,
        "stream": str(place.stream),
        "epoch": place.epoch,
        "sequence": place.sequence,
    }


def say(name: str, event: str, **fields: Any) -> None:
    """A line of logger `name`, with the position, in programs that have configured structlog; in others it would go
    to their stdout."""
    import structlog

    if structlog.is_configured():
        structlog.get_logger(name).info(event, **position(), **fields)


def add_position(logger: Any, method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor: the position on every line, unless the line names its own."""
    for name, value in position().items():
        line.setdefault(name, value)
    return line
