"""Says in the journal that something has failed, once per incarnation, or has new weights: whoever sees it first.

Reporting takes the stream's epoch, and an epoch taken needlessly would disturb a recovery under way. So each report
looks first and takes over only while the incarnation still counts as healthy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from belayer import ids
from belayer.errors import FencedError, WrongSequenceError
from belayer.ids import StreamId
from belayer.journal.codec import Recorded
from belayer.journal.events import FailureDetected, WorkerReady
from belayer.journal.store import JournalStore
from belayer.journal.writer import Reader, take_over
from belayer.projections import sandbox, worker

FailureKind = Literal["died", "hung", "unreachable", "gpu", "action-lost"]


async def report_sandbox_failure(
    store: JournalStore, trajectory: str, incarnation: str, kind: FailureKind, evidence: str, by: str
) -> bool:
    """Append FailureDetected to the sandbox's stream; False when it is known already or about another incarnation."""

    def healthy(history: Iterable[Recorded]) -> bool:
        state = sandbox.fold(history)
        return state.phase == "live" and state.incarnation == incarnation

    event = FailureDetected(incarnation, kind, evidence, by)
    return await _report(store, ids.sandbox(trajectory), healthy, event, by)


async def report_engine_failure(
    store: JournalStore, name: str, incarnation: str, kind: FailureKind, evidence: str, by: str
) -> bool:
    """Append FailureDetected to the worker's stream; False when it is known already."""

    def healthy(history: Iterable[Recorded]) -> bool:
        engine = worker.fold(history).engines.get(incarnation)
        return engine is not None and engine.status in ("starting", "ready")

    return await _report(store, ids.worker(name), healthy, FailureDetected(incarnation, kind, evidence, by), by)


async def report_weights(store: JournalStore, name: str, incarnation: str, version: int, by: str) -> bool:
    """Append WorkerReady with this version; False when that is known, or it is not the incarnation that serves."""

    def due(history: Iterable[Recorded]) -> bool:
        serving = worker.fold(history).serving
        if serving is None or serving.registered.incarnation != incarnation:
            return False
        return serving.weight_version != version

    return await _report(store, ids.worker(name), due, WorkerReady(incarnation, version), by)


async def _report(
    store: JournalStore,
    stream: StreamId,
    due: Callable[[Iterable[Recorded]], bool],
    event: FailureDetected | WorkerReady,
    by: str,
) -> bool:
    """Take the stream over only as it was seen: whoever came in between may be recovering already."""
    while True:
        reader = Reader(store, stream, from_mark=True)  # nothing is due of what is archived
        if not due(await reader.catch_up()):
            return False
        try:
            writer, _ = await take_over(store, stream, by, only_at=reader.sequence)
            await writer.append(event)
            return True
        except (FencedError, WrongSequenceError):
            continue
