"""The recovery actor: looks at whatever has failed and brings it back."""

from __future__ import annotations

from belayer.actors.sandbox_recovery import SandboxRecovery
from belayer.actors.worker_recovery import WorkerRecovery
from belayer.ids import StreamKind
from belayer.journal.store import Notice


class Recovery:
    """Handles failures of sandboxes and engines, and arms shadows once a main is ready."""

    name = "recovery"
    tags = frozenset({"failure-detected", "worker-registered", "handover-completed"})
    concurrency = 256
    """Most of it waits: for engines that start or are to be idle, for another recovery. Restores have slots of their
    own (`sandbox_recovery.AT_ONCE`)."""
    stale_after_s = 1.0

    def __init__(self, sandboxes: SandboxRecovery, workers: WorkerRecovery) -> None:
        self._sandboxes = sandboxes
        self._workers = workers

    async def handle(self, notice: Notice) -> None:
        match notice.stream.kind:
            case StreamKind.SANDBOX:
                await self._sandboxes.recover(notice.stream.name)
            case StreamKind.WORKER:
                await self._workers.recover(notice.stream.name)
            case StreamKind.TRAJECTORY | StreamKind.RUN:
                pass
