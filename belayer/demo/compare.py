"""Whether a run ended in the state of the undisturbed one. Every difference is named; none is explained away here.

Compared: every token and logprob of the live branch, every action's command and outcome, what the model saw, the
container's files, its processes, and its witness's memory. `belayer.demo.left_out` says what is not compared and why.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import NamedTuple

from belayer.demo.chat import Chat
from belayer.demo.container_state import ContainerState, FileState
from belayer.demo.left_out import masked
from belayer.journal.columns import unpack_token_ids
from belayer.projections.trajectory import Generation, Step, TrajectoryState

_SHOWN = 160


class Outcome(NamedTuple):
    """A run's end: what the journal has and what was in the container."""

    trajectory: TrajectoryState
    container: ContainerState


class Difference(NamedTuple):
    """One thing that is not as in the undisturbed run."""

    what: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found}"


def compare(undisturbed: Outcome, other: Outcome, chat: Chat) -> list[Difference]:
    """All differences, in the order of the trajectory, then files, processes, witness."""
    return [
        *_trajectories(undisturbed.trajectory, other.trajectory, chat),
        *_files(undisturbed.container.files, other.container.files),
        *_processes(undisturbed.container.processes, other.container.processes),
        *check_witness(other),
        *_unequal("the witness's memory", undisturbed.container.witness, other.container.witness),
    ]


def check_witness(outcome: Outcome) -> Iterator[Difference]:
    """The witness must have seen exactly the actions of the live branch."""
    steps = sum(1 for _ in outcome.trajectory.steps)
    if (witness := outcome.container.witness) is not None:
        yield from _unequal("actions that the witness saw", steps, witness.actions)


def _trajectories(expected: TrajectoryState, found: TrajectoryState, chat: Chat) -> Iterator[Difference]:
    yield from _unequal("how the trajectory ended", (expected.phase, expected.reason), (found.phase, found.reason))
    yield from _unequal("number of generations and actions", len(expected.segments), len(found.segments))
    for one, other in zip(expected.segments, found.segments, strict=False):
        match one, other:
            case Generation(), Generation():
                yield from _generations(one, other, chat.logprob_tolerance)
            case Step(), Step():
                yield from _steps(one, other, chat)
            case _:
                yield Difference("order of the trajectory", type(one).__name__, type(other).__name__)


def _generations(expected: Generation, found: Generation, tolerance: float) -> Iterator[Difference]:
    where = f"generation {expected.number}"
    yield from _sequences(f"{where}: tokens", expected.token_ids(), found.token_ids())
    wanted, seen = expected.logprobs(), found.logprobs()
    if len(wanted) != len(seen) or any(abs(one - other) > tolerance for one, other in zip(wanted, seen, strict=True)):
        yield from _sequences(f"{where}: logprobs", wanted, seen)
    yield from _unequal(f"{where}: finish reason", expected.finish_reason, found.finish_reason)
    yield from _unequal(f"{where}: loss mask", expected.loss_mask(), found.loss_mask())


def _steps(expected: Step, found: Step, chat: Chat) -> Iterator[Difference]:
    where = f"action {expected.started.action}"
    yield from _unequal(f"{where}: command", expected.started.command, found.started.command)
    one, other = expected.committed, found.committed
    outcomes = [(event.exit_status, event.timed_out) for event in (one, other)]
    yield from _unequal(f"{where}: exit status and time-out", outcomes[0], outcomes[1])
    seen = [
        masked(chat.tokenizer.decode(unpack_token_ids(event.observation))).decode(errors="backslashreplace")
        for event in (one, other)
    ]
    if seen[0] != seen[1]:
        lines = difflib.unified_diff(seen[0].splitlines(), seen[1].splitlines(), lineterm="", n=0)
        changed = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
        gone = " / ".join(line[1:] for line in changed if line.startswith("-"))
        come = " / ".join(line[1:] for line in changed if line.startswith("+"))
        yield Difference(f"{where}: what the model saw", _short(gone), _short(come))


def _sequences(what: str, expected: list[int] | list[float], found: list[int] | list[float]) -> Iterator[Difference]:
    if expected != found:
        at = next(
            (index for index, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]),
            min(len(expected), len(found)),
        )
        yield Difference(
            f"{what} from {at} on", f"{_short(expected[at:])} ({len(expected)})", f"{_short(found[at:])} ({len(found)})"
        )


def _files(expected: dict[str, FileState], found: dict[str, FileState]) -> Iterator[Difference]:
    for path in sorted(expected.keys() | found.keys()):
        one, other = expected.get(path), found.get(path)
        if one is None or other is None:
            yield Difference(f"file {path}", one.kind if one else "nothing", other.kind if other else "nothing")
        elif one != other:
            fields = [field for field in FileState._fields if getattr(one, field) != getattr(other, field)]
            values = [", ".join(f"{field} {getattr(state, field)!r}" for field in fields) for state in (one, other)]
            yield Difference(f"file {path}", _short(values[0]), _short(values[1]))


def _processes(expected: list[str], found: list[str]) -> Iterator[Difference]:
    if expected != found:
        yield Difference("background processes", _short(expected), _short(found))


def _unequal(what: str, expected: object, found: object) -> Iterator[Difference]:
    if expected != found:
        yield Difference(what, _short(expected), _short(found))


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split()) or "nothing"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
