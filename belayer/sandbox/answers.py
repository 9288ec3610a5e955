"""What a runner may answer, and what it may leave behind to be gone on from.

Both come out of a container and are hostile: they are decoded into these types, with these bounds, or not at all. Every
number fits the journal. What is not an answer is a SandboxFailedError, whoever made it.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from belayer.errors import SandboxFailedError

HEAD_LIMIT_BYTES = 1 << 16
"""Of an answer's first line. The limit of all of it is the control folder's."""
ERROR_LIMIT = 500
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
A = TypeVar("A", bound=msgspec.Struct)


class Refusal(msgspec.Struct):
    """Instead of an answer."""

    error: str | None = None


class Last(msgspec.Struct):
    """To `ping`, `adopt` and `state`, with which a Saved comes: the number of the last action begun."""

    last: Number


class Ran(msgspec.Struct):
    """To `run` and `setup`, besides the output."""

    exit_status: Annotated[int, Meta(ge=0, le=255)]
    duration_s: Annotated[float, Meta(ge=0.0, le=1e9)]
    timed_out: bool
    dropped_bytes: Number


class Saved(msgspec.Struct):
    """For a fresh runner that goes on in another's place: the last action, and the last few results with outputs."""

    last: Number
    results: Annotated[list[tuple[Number, Ran, bytes]], Meta(max_length=64)]


def answer(incarnation: str, head: bytes, kind: type[A]) -> A:
    """The answer in a reply's first line. SandboxFailedError when it is a refusal, or none of this kind."""
    if len(head) > HEAD_LIMIT_BYTES:
        raise SandboxFailedError(incarnation, f"its runner's answer has a first line of {len(head):,} bytes")
    refusal = _decoded(incarnation, head, Refusal)
    if refusal.error is not None:
        raise SandboxFailedError(incarnation, refusal.error[:ERROR_LIMIT])
    return _decoded(incarnation, head, kind)


def saved(incarnation: str, data: bytes) -> Saved:
    """What a runner has left behind. SandboxFailedError when no runner could go on from it."""
    return _decoded(incarnation, data, Saved)


def adoption(state: Saved, action: int) -> dict[str, Any]:
    """The same in the words of a request, for a runner that goes on after `action`."""
    return msgspec.to_builtins(msgspec.structs.replace(state, last=action))


def _decoded(incarnation: str, data: bytes, kind: type[A]) -> A:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        problem = f"what its runner says is no {kind.__name__.lower()}: {error}"
        raise SandboxFailedError(incarnation, problem[:ERROR_LIMIT]) from None
