"""Steps: named pieces of work whose duration and outcome go to the observers, if there are any.

An observer that fails breaks the step that it observes, so it does nothing that can fail. STEPS lists every name: it
is what metrics and dashboard are made from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Protocol

STEPS = {
    "append": "An append, from the call to its acknowledgement.",
    "wait": "Waiting for a stream to grow, answered or not.",
    "open": "Opening a trajectory: waiting for its recovery, reading, folding, taking it over.",
    "fold": "Computing a trajectory's state from its events.",
    "checkpoint": "One capture of a sandbox, whatever came of it.",
    "recovery.sandbox": "A sandbox's recovery as a whole; the next three are its phases.",
    "recovery.fence": "Shutting out everyone else from the sandbox and its trajectory, and planning.",
    "recovery.restore": "A container from its checkpoint, or from its image.",
    "recovery.resume": "The trajectory's resumption.",
    "recovery.worker": "A worker's recovery as a whole, by handover or by a new start.",
    "handover.fence": "Shutting out everyone else from the worker.",
    "handover.prove": "Proving that the old main is dead.",
    "handover.map": "Its memory becomes the shadow's.",
    "handover.adopt": "Its KV cache becomes the shadow's.",
    "handover.serve": "The rest of the new main's way into service.",
}
"""Every step and what it is."""

COUNTS = {
    "checkpoint.captured_bytes": "Bytes that captures of sandboxes hold, what they share counted each time.",
    "checkpoint.stored_bytes": "Bytes that captures of sandboxes have added to the disk.",
}
"""Every amount that is added up and what it is."""

Ended = Callable[[float, BaseException | None], None]
"""Told how long the step took, in seconds, and the exception that ended it, if one did."""
Fields = Mapping[str, str | int]


class Observer(Protocol):
    """Whoever watches the steps of this process."""

    def begin(self, step: str, fields: Fields) -> Ended:
        """A step begins, in the calling task; its end is told in the same task."""
        ...

    def count(self, what: str, amount: float) -> None:
        """There is more of something, of COUNTS."""
        ...


observers: tuple[Observer, ...] = ()
"""Those who watch now. Whoever is in a hurry looks here first and spares himself the rest."""
_OFF = nullcontext()


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell the observer of every step of this process while the context lasts."""
    global observers
    observers = (*observers, observer)
    try:
        yield
    finally:
        observers = tuple(other for other in observers if other is not observer)


def step(name: str, **fields: str | int) -> AbstractContextManager[None]:
    """The work in this context is the step `name`; `fields` say of what (a stream, an epoch, a sequence)."""
    return _Step(name, fields) if observers else _OFF


def took(name: str, took_s: float, **fields: str | int) -> None:
    """A step that someone else has measured has taken `took_s` seconds."""
    for observer in observers:
        observer.begin(name, fields)(took_s, None)


def count(what: str, amount: float) -> None:
    """There is so much more of `what`, of COUNTS."""
    for observer in observers:
        observer.count(what, amount)


class _Step(AbstractContextManager[None]):
    def __init__(self, name: str, fields: Fields) -> None:
        self._name = name
        self._fields = fields

    def __enter__(self) -> None:
        self._ended = [observer.begin(self._name, self._fields) for observer in observers]
        self._begun = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        took_s = time.perf_counter() - self._begun
        for ended in reversed(self._ended):
            ended(took_s, error)
