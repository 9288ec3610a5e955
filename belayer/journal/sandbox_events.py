"""The events of a sandbox; everybody imports them from `belayer.journal.events`, whose rules they follow."""

from __future__ import annotations

import msgspec

from belayer.journal.event import Event


class SandboxSpec(msgspec.Struct, frozen=True, array_like=True):
    """How to make a trajectory's container, and make it again for the initial state."""

    image: str
    workdir: str = "/"
    environment: dict[str, str] = {}
    setup: tuple[str, ...] = ()
    """Commands that bring a fresh container to boundary 0, before any action (services to start, say)."""
    memory_bytes: int | None = None
    cpus: float | None = None
    network: str = "none"
    """"none", or "bridge": Docker's default network, whose connections to the outside cannot be checkpointed."""
    user: str = ""
    """Whom actions run as: "name", "uid" or "uid:gid" in the container. Empty: root."""
    binds: tuple[str, ...] = ()
    """"SOURCE:TARGET" or "SOURCE:TARGET:ro"; a source is a folder of the host or a volume's name. Not captured."""
    read_only: bool = False
    """Whether the image's files cannot be written."""
    tmpfs: tuple[str, ...] = ()
    """Folders in memory; captured with the processes."""
    cap_drop: tuple[str, ...] = ()
    """Capabilities taken from Docker's default ones; "ALL" takes all."""
    cap_add: tuple[str, ...] = ()


class LeftOut(msgspec.Struct, frozen=True, array_like=True):
    """Something of a container that a checkpoint of its files alone leaves out (decision 15)."""

    pid: int
    """Of a process, as the container counts; 0: it is none."""
    what: str
    """Its command line, the first 100 characters; or what else it is (a file in /dev/shm, say)."""
    cause: str
    """Why it cannot be captured; empty: it could, but not without those that cannot."""


class SandboxCreated(Event, frozen=True, array_like=True, tag="sandbox-created"):
    """A fresh container at boundary 0. `pid` and `pid_start_ticks` name the container's process 1 on its host."""

    incarnation: str
    container_id: str
    image_digest: str
    host: str
    pid: int
    pid_start_ticks: int
    run: str
    spec: SandboxSpec


class CheckpointStarted(Event, frozen=True, array_like=True, tag="checkpoint-started"):
    """The intent to capture the boundary of this incarnation."""

    checkpoint: str
    incarnation: str
    boundary: int
    boundary_sequence: int


class CheckpointPublished(Event, frozen=True, array_like=True, tag="checkpoint-published"):
    """Layer and images of the boundary are complete, verified and durable. Only now may anyone restore it."""

    checkpoint: str
    incarnation: str
    boundary: int
    boundary_sequence: int
    size_bytes: int
    frozen_s: float
    total_s: float
    stored_bytes: int = 0
    """What it added to the disk; `size_bytes` counts what it shares with other checkpoints, too."""
    not_captured: tuple[str, ...] = ()
    """Mount points of the host's folders and volumes, whose contents are not in it."""
    left_out: tuple[LeftOut, ...] = ()
    """Not empty: it holds the files alone, as if all these had been killed at the boundary."""


class CheckpointExtended(Event, frozen=True, array_like=True, tag="checkpoint-extended"):
    """Nothing has changed since `checkpoint` was captured: it holds this boundary too. `begun` is the one that was not
    needed."""

    checkpoint: str
    begun: str
    incarnation: str
    boundary: int
    boundary_sequence: int
    frozen_s: float
    total_s: float


class CheckpointDiscarded(Event, frozen=True, array_like=True, tag="checkpoint-discarded"):
    """The checkpoint is not, or no longer, usable."""

    checkpoint: str
    reason: str


class SandboxRestored(Event, frozen=True, array_like=True, tag="sandbox-restored"):
    """A new incarnation holds the boundary's files and processes; `checkpoint` is empty for the initial state."""

    checkpoint: str
    boundary: int
    boundary_sequence: int
    incarnation: str
    container_id: str
    image_digest: str
    host: str
    pid: int
    pid_start_ticks: int
    restore_s: float
    left_out: tuple[LeftOut, ...] = ()
    """What stood at that boundary and was not brought back, for the checkpoint does not hold it."""


class SandboxRemoved(Event, frozen=True, array_like=True, tag="sandbox-removed"):
    """The trajectory needs no container any more and it is gone, with its checkpoints."""

    incarnation: str
    reason: str
