"""What engines, hosts and the memory server say to each other: one JSON message a packet, descriptors beside it.

The socket is a Unix SOCK_SEQPACKET, so that a message is whole or absent. Every request has one answer, Refused
included, but for Armed and Serving, which answer an order. Orders (ArmNow, Follow, Granted, Released) go to engines and
EngineEvent or WeightsEvent to watchers, unasked.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Literal, NoReturn

import msgspec

from belayer.gpu import errors

MAX_MESSAGE_BYTES = 64 << 10
MAX_DESCRIPTORS = 8

WEIGHT_VERSION = "weight_version"
"""Among Promote's facts: the version of the weights that the new holder serves."""

Role = Literal["main", "shadow", "control"]
Spec = dict[str, int | str]
"""What a region looks like, field by field. Two engines may share it only if theirs are equal."""


class Region(msgspec.Struct, frozen=True):
    """Memory that the server has: its shape and size in bytes."""

    spec: Spec
    size_bytes: int


class Weights(msgspec.Struct, frozen=True):
    """`absent`; `writing` version by writer; `ready` at version; `torn`: the writer of version died."""

    state: Literal["absent", "writing", "ready", "torn"] = "absent"
    version: int = 0
    writer: str = ""


# --- requests --------------------------------------------------------------------------------------------------------


class Register(msgspec.Struct, frozen=True, tag=True):
    """The first message of a connection. The server knows the process by the socket's peer credentials."""

    incarnation: str
    role: Role


class OpenWeights(msgspec.Struct, frozen=True, tag=True):
    """Wait for the weights region: to read it when it is there, to write it when it is not, or is torn.

    `anew`: from a main, to write it also when it is there, because another rank's is not, or is of another version.
    """

    spec: Spec
    size_bytes: int
    anew: bool = False


class BeginWeights(msgspec.Struct, frozen=True, tag=True):
    """Write a new version in place. Only the holder of the arena may."""

    version: int


class CommitWeights(msgspec.Struct, frozen=True, tag=True):
    """What was begun is complete, and this process reads it only from now on."""

    version: int


class OpenArena(msgspec.Struct, frozen=True, tag=True):
    """A main takes the lease; a shadow only says what it will want, and waits."""

    spec: Spec
    kv_bytes: int
    table_bytes: int
    ledger_bytes: int


class Serving(msgspec.Struct, frozen=True, tag=True):
    """From the holder: it writes its ledger, its bell is armed. Seconds by phase, and counts."""

    facts: dict[str, float]


class Armed(msgspec.Struct, frozen=True, tag=True):
    """From a shadow, on ArmNow: it waits for the lease."""

    facts: dict[str, float]


class Arm(msgspec.Struct, frozen=True, tag=True):
    """From a host: the engine is warm. A main's silence counts as a hang from now on; a shadow is to be armed."""

    incarnation: str


class Promote(msgspec.Struct, frozen=True, tag=True):
    """From a host: lend the arena to that shadow once its holder is proved dead.

    `early`: it may write already when the holder's bell has rung, but not where the holder could still write.
    """

    incarnation: str
    kill_old: bool
    adopt: bool
    early: bool
    timeout_s: float


class Watch(msgspec.Struct, frozen=True, tag=True):
    """From a host: send EngineEvents on this connection. Answered with Facts."""


class WatchWeights(msgspec.Struct, frozen=True, tag=True):
    """From a host: send WeightsEvents on this connection, the first at once if they are ready. Answered with Facts."""


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """What the server has and lends."""


Request = (
    Register
    | OpenWeights
    | BeginWeights
    | CommitWeights
    | OpenArena
    | Serving
    | Armed
    | Arm
    | Promote
    | Watch
    | WatchWeights
    | AskStatus
)


# --- answers, orders and events --------------------------------------------------------------------------------------


class Registered(msgspec.Struct, frozen=True, tag=True):
    weights: Weights
    arena: Region | None


class WeightsLent(msgspec.Struct, frozen=True, tag=True):
    """With one descriptor, writable or not."""

    size_bytes: int
    version: int
    writable: bool


class ArenaLent(msgspec.Struct, frozen=True, tag=True):
    """With the engine's own slot table and ledger, writable; to a main also the KV, writable. A shadow gets epoch 0.

    `last_epoch`: that of the last holder, whose slot table and ledger come next, readable; 0 when there was none.
    """

    epoch: int
    last_epoch: int = 0


class ArmNow(msgspec.Struct, frozen=True, tag=True):
    """Order to a shadow: let go of the scratch, map the KV that comes readable with it, hold requests, wait."""


class Follow(msgspec.Struct, frozen=True, tag=True):
    """Order to an armed shadow: the holder's slot table and ledger come readable, to be mapped ahead of time."""


class Granted(msgspec.Struct, frozen=True, tag=True):
    """Order to an armed shadow: it is the holder, and adopts what the one of `last_epoch` proved.

    `weights_version`: that of the weights, which it has mapped. `writable`: the KV comes, to be written now; otherwise
    it comes with Released. `quarantined`: the last holder is still dying and may write where it could. `follow`: the
    last holder's slot table and ledger come, as with Follow.
    """

    epoch: int
    last_epoch: int
    weights_version: int
    adopt: bool
    writable: bool
    quarantined: bool
    follow: bool


class Released(msgspec.Struct, frozen=True, tag=True):
    """Order to a holder: the last one is proved dead; nothing is quarantined.

    `writable`: the KV comes, to be written from now on.
    """

    writable: bool


class EngineEvent(msgspec.Struct, frozen=True, tag=True):
    """`dying`: its scheduler runs no more. `dead`: its process is gone. `hung`: it was silent, and has been killed.

    `unfit`: it holds the arena of a device that reports errors. It goes on until somebody ends it.
    """

    kind: Literal["dying", "dead", "hung", "unfit"]
    incarnation: str
    evidence: str = ""


class WeightsEvent(msgspec.Struct, frozen=True, tag=True):
    """These weights are complete, and what engines serve from now on."""

    version: int


class Facts(msgspec.Struct, frozen=True, tag=True):
    """The answer to Arm, Promote, Watch and WatchWeights."""

    facts: dict[str, float]


class EngineStatus(msgspec.Struct, frozen=True):
    incarnation: str
    pid: int
    role: Role
    armed: bool
    holds_arena: bool


class Status(msgspec.Struct, frozen=True, tag=True):
    device: str
    epoch: int
    holder: str
    weights: Weights
    arena: Region | None
    engines: list[EngineStatus]
    unhealthy: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A typed error: the class's name in belayer.gpu.errors and its arguments."""

    error: str
    arguments: list[int | str]


Order = ArmNow | Follow | Granted | Released
Answer = Registered | WeightsLent | ArenaLent | Order | EngineEvent | WeightsEvent | Facts | Status | Refused

_requests = msgspec.json.Decoder(Request)
_answers = msgspec.json.Decoder(Answer)


def send(connection: socket.socket, message: Request | Answer, fds: Sequence[int] = ()) -> None:
    """Send one message whole. The descriptors stay the caller's."""
    socket.send_fds(connection, [msgspec.json.encode(message)], list(fds))


def receive_request(connection: socket.socket) -> Request | None:
    """The next request, or None when the other side is gone. msgspec.DecodeError when it is not one of ours."""
    data, fds = _receive(connection)
    for fd in fds:
        os.close(fd)
    return _requests.decode(data) if data else None


def receive_answer(connection: socket.socket) -> tuple[Answer, list[int]] | None:
    """The next answer and its descriptors, now the caller's; None when the server is gone."""
    data, fds = _receive(connection)
    return (_answers.decode(data), fds) if data else None


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    try:
        data, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
    except ConnectionError:
        return b"", []
    return data, fds


def refusal(error: errors.ArenaError) -> Refused:
    """The error as a message. Its constructor's arguments are its fields, in order."""
    arguments = [value if isinstance(value, int | str) else str(value) for value in vars(error).values()]
    return Refused(type(error).__name__, arguments)


def raise_refused(refused: Refused) -> NoReturn:
    """Raise the error that the server refused with."""
    kind = getattr(errors, refused.error, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.ArenaError)):
        raise errors.ArenaRefusedError(f"{refused.error} {refused.arguments}")
    raise kind(*refused.arguments)
