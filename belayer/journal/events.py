"""The events: past-tense facts about one entity, frozen, tagged, never changed once written.

Tags are part of the stored format. A new field gets a default and keeps its tag; a breaking change gets a new tag and
an upcaster in `belayer.journal.codec`. Structs travel as msgpack arrays in field order, so fields are only ever added
at the end. Token columns are packed little-endian bytes (see `belayer.journal.columns`).

Boundaries are named by (number, sequence): the action's number on its branch and the sequence of its ActionCommitted
in the trajectory's stream; the initial state is boundary (0, 0). After a rewind a number comes again with another
sequence.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from belayer.journal.event import Event
from belayer.journal.sandbox_events import (
    CheckpointDiscarded as CheckpointDiscarded,
)
from belayer.journal.sandbox_events import (
    CheckpointExtended as CheckpointExtended,
)
from belayer.journal.sandbox_events import (
    CheckpointPublished as CheckpointPublished,
)
from belayer.journal.sandbox_events import (
    CheckpointStarted as CheckpointStarted,
)
from belayer.journal.sandbox_events import (
    LeftOut as LeftOut,
)
from belayer.journal.sandbox_events import (
    SandboxCreated as SandboxCreated,
)
from belayer.journal.sandbox_events import (
    SandboxRemoved as SandboxRemoved,
)
from belayer.journal.sandbox_events import (
    SandboxRestored as SandboxRestored,
)
from belayer.journal.sandbox_events import (
    SandboxSpec as SandboxSpec,
)

# --- any stream --------------------------------------------------------------------------------------------------


class EpochStarted(Event, frozen=True, array_like=True, tag="epoch-started"):
    """A writer has taken the stream over; every lower epoch is refused from here on.

    `belayer_version`: of the writer, who wrote all events of the epoch; empty in older journals, without the field.
    """

    epoch: int
    writer: str
    belayer_version: str = ""


class FailureDetected(Event, frozen=True, array_like=True, tag="failure-detected"):
    """The entity's incarnation has failed. `evidence` is what was seen, for a person to read."""

    incarnation: str
    kind: Literal["died", "hung", "unreachable", "gpu", "action-lost"]
    evidence: str
    detected_by: str


class RecoveryStarted(Event, frozen=True, array_like=True, tag="recovery-started"):
    """The intent to replace the failed incarnation; repeated by whoever takes an unfinished recovery over."""

    failed_incarnation: str
    plan: str
    recovered_by: str


class StreamArchived(Event, frozen=True, array_like=True, tag="stream-archived"):
    """Events 1 to `through_sequence` are durable in the archive's segment too, and may leave the server.

    Stored in one entry with the archiver's EpochStarted. Once the stream is trimmed that entry is the first one left:
    it keeps epoch, sequence and digest, so earlier writers stay refused and the chain goes on.
    """

    through_sequence: int
    segment: str


# --- trajectory --------------------------------------------------------------------------------------------------


class TrajectoryStarted(Event, frozen=True, array_like=True, tag="trajectory-started"):
    """A trajectory has begun. `prompt`: token ids, packed u32. `labels`: whatever the caller wants to find it by."""

    run: str
    task: str
    prompt: bytes
    labels: dict[str, str] = msgspec.field(default_factory=dict[str, str])


class GenerationStarted(Event, frozen=True, array_like=True, tag="generation-started"):
    """An engine begins to generate; generations are numbered from 1 on their branch."""

    generation: int
    worker: str
    incarnation: str


class GenerationResumed(Event, frozen=True, array_like=True, tag="generation-resumed"):
    """Another engine incarnation goes on after `offset` journaled tokens of this generation."""

    generation: int
    offset: int
    worker: str
    incarnation: str


class TokensAppended(Event, frozen=True, array_like=True, tag="tokens-appended"):
    """A token chunk: `count` tokens from `offset` in the generation.

    `token_ids`: count x u32; `logprobs`: count x f32; `loss_mask`: count x u8, all little-endian.
    """

    generation: int
    offset: int
    count: int
    token_ids: bytes
    logprobs: bytes
    loss_mask: bytes
    weight_version: int


class TokensPacked(Event, frozen=True, array_like=True, tag="tokens-packed"):
    """A TokensAppended as a store with `token_form` keeps it, in fewer bytes (see `belayer.journal.packing`).

    Only the codec meets it: whoever reads the stream gets the TokensAppended.
    """

    generation: int
    offset: int
    count: int
    form: Literal["bf16", "zstd", "bf16+zstd"]
    columns: bytes
    weight_version: int


class GenerationFinished(Event, frozen=True, array_like=True, tag="generation-finished"):
    """The generation has ended with `count` tokens."""

    generation: int
    count: int
    finish_reason: str


class ActionStarted(Event, frozen=True, array_like=True, tag="action-started"):
    """The intent to run an action; actions are numbered from 1 on their branch."""

    action: int
    command: str
    timeout_s: float
    sandbox_incarnation: str


class ActionCommitted(Event, frozen=True, array_like=True, tag="action-committed"):
    """The boundary: the action has ended and this is what the model sees of it.

    `observation`: token ids, packed u32; `observation_digest`: blake2b-128 of the output as the runner captured it.
    """

    action: int
    exit_status: int
    observation: bytes
    observation_digest: bytes
    duration_s: float
    timed_out: bool = False
    dropped_bytes: int = 0


class Rewound(Event, frozen=True, array_like=True, tag="rewound"):
    """Everything after boundary (number, sequence) is superseded. Nothing is deleted."""

    to_boundary: int
    to_sequence: int
    reason: str


class TrajectoryResumed(Event, frozen=True, array_like=True, tag="trajectory-resumed"):
    """Context and environment agree again; the rollout may take the trajectory over and go on."""

    boundary: int
    boundary_sequence: int
    sandbox_incarnation: str
    left_out: tuple[LeftOut, ...] = ()
    """Processes of the boundary that the environment lacks now: all else agrees (decision 15)."""


class TrajectoryFinished(Event, frozen=True, array_like=True, tag="trajectory-finished"):
    """The trajectory's sample is complete."""

    reason: str
    reward: float | None = None


class TrajectoryAborted(Event, frozen=True, array_like=True, tag="trajectory-aborted"):
    """The trajectory was given up; its sample must not be trained on."""

    reason: str


# --- worker ------------------------------------------------------------------------------------------------------


class WorkerRegistered(Event, frozen=True, array_like=True, tag="worker-registered"):
    """An engine process exists, as the main or as a shadow of the main."""

    incarnation: str
    role: Literal["main", "shadow"]
    host: str
    pid: int
    pid_start_ticks: int
    address: str
    run: str


class WorkerReady(Event, frozen=True, array_like=True, tag="worker-ready"):
    """The incarnation serves requests (a shadow: could serve them after a handover) with this weight version."""

    incarnation: str
    weight_version: int


class HandoverCompleted(Event, frozen=True, array_like=True, tag="handover-completed"):
    """The shadow is the main now; the old incarnation is proved dead, or can execute nothing any more.

    `phases_s`: where `handover_s` went, in order: fence (others are shut out), prove (the old one is dead), map (its
    memory is the new one's), adopt (its KV cache is), wait and unlock (until it may write there), serve (the rest).
    `adopted_tokens`: whose KV was not recomputed.
    """

    from_incarnation: str
    to_incarnation: str
    handover_s: float
    phases_s: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    adopted_tokens: int = 0


class WorkerDraining(Event, frozen=True, array_like=True, tag="worker-draining"):
    """The incarnation serves, but is to be replaced: new requests go to another worker if one can serve them."""

    incarnation: str
    reason: str


class WorkerRemoved(Event, frozen=True, array_like=True, tag="worker-removed"):
    """The incarnation's process is gone and nobody will start it again."""

    incarnation: str
    reason: str


# --- run ---------------------------------------------------------------------------------------------------------


class RunStarted(Event, frozen=True, array_like=True, tag="run-started"):
    """A rollout has begun. `owner_pid` on `host`: when that process is gone, everything of the run is removed."""

    host: str
    owner_pid: int
    owner_start_ticks: int
    durability: str
    belayer_version: str


class RunFinished(Event, frozen=True, array_like=True, tag="run-finished"):
    """The rollout has ended and left nothing behind."""

    reason: str


class WeightsPublished(Event, frozen=True, array_like=True, tag="weights-published"):
    """Engines may serve this weight version from now on."""

    weight_version: int


class TrainerCheckpointed(Event, frozen=True, array_like=True, tag="trainer-checkpointed"):
    """The learner's state after `step` is complete at `path`; it produced `weight_version`."""

    step: int
    weight_version: int
    path: str


class Sealed(Event, frozen=True, array_like=True, tag="sealed"):
    """An event whose payload is encrypted (see `belayer.journal.sealing`): `event` is the rest of it, readable.

    `key` names the key; `sealed` is the ciphertext with its tag, under the nonce of 12 bytes.
    """

    key: str
    nonce: bytes
    sealed: bytes
    event: TrajectoryStarted | TokensAppended | ActionStarted | ActionCommitted


TrajectoryEvent = (
    TrajectoryStarted
    | GenerationStarted
    | GenerationResumed
    | TokensAppended
    | GenerationFinished
    | ActionStarted
    | ActionCommitted
    | Rewound
    | TrajectoryResumed
    | TrajectoryFinished
    | TrajectoryAborted
    | Sealed
)
SandboxEvent = (
    SandboxCreated
    | CheckpointStarted
    | CheckpointPublished
    | CheckpointExtended
    | CheckpointDiscarded
    | SandboxRestored
    | SandboxRemoved
)
WorkerEvent = WorkerRegistered | WorkerReady | HandoverCompleted | WorkerDraining | WorkerRemoved
RunEvent = RunStarted | RunFinished | WeightsPublished | TrainerCheckpointed
CommonEvent = EpochStarted | FailureDetected | RecoveryStarted | StreamArchived
AnyEvent = TrajectoryEvent | SandboxEvent | WorkerEvent | RunEvent | CommonEvent
StoredEvent = AnyEvent | TokensPacked
"""What the codec meets; everybody else meets AnyEvent."""

NOTICED = (
    TrajectoryStarted,
    ActionCommitted,
    TrajectoryFinished,
    TrajectoryAborted,
    FailureDetected,
    SandboxCreated,
    CheckpointPublished,
    SandboxRestored,
    WorkerRegistered,
    WorkerReady,
    HandoverCompleted,
    RunStarted,
    RunFinished,
)
"""Events that someone must act on: their append also puts a notice on the shard's control stream, atomically.

RecoveryStarted is not among them: whoever holds the failure's notice is at work, and if he dies that notice goes stale.
"""


def readable(event: AnyEvent) -> AnyEvent:
    """What can be read of the event without a key: of a sealed one all but its payload, which is empty."""
    return event.event if isinstance(event, Sealed) else event


def tag_of(event: StoredEvent) -> str:
    """The event's stored tag, for messages and notices."""
    tag = event.__struct_config__.tag
    assert isinstance(tag, str)
    return tag
