"""How much one checkpoint may take of the disk, of the memory and of the container's time, and how it ends early.

A container's contents are hostile, and may just be large: what is too much is refused before the freeze, with what was
found and the limit; what becomes too much meanwhile is refused then. Whoever copies or reads asks `go_on` between files
and within large ones, so a checkpoint that is cancelled or late ends within about 0.1 s, frozen or not.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from belayer.errors import CheckpointFailedError, CheckpointRefusedError

PIECE_BYTES = 32 << 20
"""So much of a file is copied or read between two questions."""

Step = Callable[[int], object]
"""Called before so many bytes are copied or read; raises to end it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The defaults are far above what agents' containers hold."""

    checkpoint_s: float = 600.0
    """Copying 5 GB anew, with digests and sync, has taken 75 s on a busy machine."""
    dump_s: float = 120.0
    """CRIU's part, in which the container stands."""
    layer_bytes: int = 64 << 30
    layer_entries: int = 1_000_000
    """Files, folders and links; looking at so many takes 10 s and 1 GB of memory."""
    memory_bytes: int = 64 << 30
    runner_state_bytes: int = 32 << 20
    """The last actions' results, kept with each checkpoint of a quiet container. By itself the runner keeps 3 MB."""
    frozen_bytes: int = 1 << 30
    """Of the layer, copied while the container stands: files that have changed since they were copied. About 1 s, which
    is less than what a container without checkpoints loses."""
    held_bytes: int = 1 << 30
    """The same for a container that is held from the start, because its actions were faster again and again."""
    spare_bytes: int = 64 << 20
    """Left free on the disk, and for what is not counted before."""


LIMITS = Limits()


class Bounds:
    """The limits, the deadline and the end of one checkpoint. `cancel` may come from any thread."""

    def __init__(self, incarnation: str, checkpoint: str, limits: Limits = LIMITS) -> None:
        """The time counts from here."""
        self.limits = limits
        self._incarnation = incarnation
        self._checkpoint = checkpoint
        self._deadline = time.monotonic() + limits.checkpoint_s
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    @property
    def left_s(self) -> float:
        """Until the deadline."""
        return self._deadline - time.monotonic()

    @property
    def dump_s(self) -> float:
        """How long CRIU may take."""
        return max(1.0, min(self.limits.dump_s, self.left_s))

    def go_on(self, _: int = 0) -> None:
        """CheckpointFailedError when it was cancelled or is late."""
        if self._cancelled.is_set():
            raise CheckpointFailedError(self._checkpoint, "it was cancelled")
        if self.left_s < 0:
            raise CheckpointFailedError(self._checkpoint, f"it took longer than {self.limits.checkpoint_s:.1f} s")

    def wait(self, duration_s: float) -> None:
        """Return after that time, or at once when it is cancelled."""
        self._cancelled.wait(duration_s)

    def refuse(self, cause: str) -> NoReturn:
        raise CheckpointRefusedError(self._incarnation, cause)

    def check_layer(self, entries: int, size_bytes: int) -> None:
        """CheckpointRefusedError when the layer has too many entries or bytes."""
        if entries > self.limits.layer_entries:
            self.refuse(
                f"its layer has {entries:,} files and folders or more, the limit is {self.limits.layer_entries:,}"
            )
        if size_bytes > self.limits.layer_bytes:
            self.refuse(f"its layer holds {sized(size_bytes)}, the limit is {sized(self.limits.layer_bytes)}")

    def check_memory(self, size_bytes: int) -> None:
        """CheckpointRefusedError when the processes have too much memory."""
        if size_bytes > self.limits.memory_bytes:
            self.refuse(f"its processes hold {sized(size_bytes)}, the limit is {sized(self.limits.memory_bytes)}")

    def check_runner_state(self, size_bytes: int) -> None:
        """CheckpointRefusedError when the last results are too large to be kept with each checkpoint."""
        limit = self.limits.runner_state_bytes
        if size_bytes > limit:
            self.refuse(f"the results of its last actions take {sized(size_bytes)}, the limit is {sized(limit)}")

    def check_disk(self, folder: Path, size_bytes: int) -> None:
        """CheckpointRefusedError when so much does not fit on the folder's disk."""
        disk = os.statvfs(folder)
        free = disk.f_bavail * disk.f_frsize
        needed = size_bytes + self.limits.spare_bytes
        if needed > free:
            self.refuse(f"{sized(needed)} are needed on the disk of {folder} and {sized(free)} are free")


def sized(size_bytes: int) -> str:
    """As a person reads it, and exact."""
    return (
        f"{size_bytes / (1 << 30):.2f} GiB ({size_bytes:,} bytes)" if size_bytes >= 1 << 30 else f"{size_bytes:,} bytes"
    )


def unbounded(_: int = 0) -> None:
    """The Step of work that has its own end."""
