"""Names of things: streams, events, checkpoints, incarnations. Pure strings and bytes, no I/O but the random source."""

from __future__ import annotations

import difflib
import enum
import os
import re
from collections.abc import Iterable
from typing import NamedTuple

from belayer.errors import InputError

EVENT_ID_BYTES = 16
_DRAWN_AT_ONCE = 256
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_MADE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z")


class StreamKind(enum.StrEnum):
    """What an entity is; each entity's events are one stream."""

    TRAJECTORY = "trajectory"
    SANDBOX = "sandbox"
    WORKER = "worker"
    RUN = "run"

    __hash__ = str.__hash__
    """Enum's own is a Python function, and stream ids are looked up for every append."""


class StreamId(NamedTuple):
    """One entity's stream, written `kind/name`. A sandbox has the name of the trajectory that it serves."""

    kind: StreamKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> StreamId:
        """Read `kind/name`; a text that is not one is an InputError."""
        kind, slash, name = text.partition("/")
        if not slash or kind not in StreamKind.__members__.values():
            raise InputError(f"{text!r} is not a stream; expected one of {', '.join(StreamKind)}, a slash and a name")
        return cls(StreamKind(kind), checked_name(name))


def checked_name(name: str) -> str:
    """The name itself when it may name an entity: it becomes part of Redis keys, container names and paths."""
    if not _NAME.match(name):
        raise InputError(
            f"{name!r} is not a usable name; expected 1 to 128 of A-Z a-z 0-9 . _ - and a letter or digit first"
        )
    return name


def checked_made_name(name: str) -> str:
    """The same for a container's or a checkpoint's name, which is made of its trajectory's and longer."""
    if not _MADE.match(name):
        raise InputError(f"{name!r} is not the name of a container or a checkpoint; `belayer checkpoints` lists some")
    return name


def nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The known names that a mistyped one may have meant, the likeliest first: those it is a part of, then the like."""
    there = sorted(set(known))
    parts = [one for one in there if name.casefold() in one.casefold()]
    alike = difflib.get_close_matches(name, there, most)
    return list(dict.fromkeys([*parts, *alike]))[:most]


def trajectory(name: str) -> StreamId:
    return StreamId(StreamKind.TRAJECTORY, checked_name(name))


def sandbox(name: str) -> StreamId:
    return StreamId(StreamKind.SANDBOX, checked_name(name))


def worker(name: str) -> StreamId:
    return StreamId(StreamKind.WORKER, checked_name(name))


def run(name: str) -> StreamId:
    return StreamId(StreamKind.RUN, checked_name(name))


_drawn: list[bytes] = []
"""Event ids drawn ahead: asking the kernel for each costs more than encoding an event."""
os.register_at_fork(after_in_child=_drawn.clear)


def new_event_id() -> bytes:
    """16 random bytes: the identity under which an uncertain append is looked up again."""
    try:
        return _drawn.pop()
    except IndexError:
        random = os.urandom(EVENT_ID_BYTES * _DRAWN_AT_ONCE)
        _drawn.extend(random[at : at + EVENT_ID_BYTES] for at in range(EVENT_ID_BYTES, len(random), EVENT_ID_BYTES))
        return random[:EVENT_ID_BYTES]


def new_suffix() -> str:
    """8 random hex digits, to tell incarnations and checkpoints apart."""
    return os.urandom(4).hex()
