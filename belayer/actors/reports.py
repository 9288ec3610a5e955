"""Says in the journal that something has failed: once per incarnation, whoever sees it first.

Reporting takes the stream's epoch, and an epoch taken needlessly would disturb a recovery under way. So each report
looks first and takes over only while the incarnation still counts as healthy.
"""

from __future__ import annotations

from typing import Literal

from belayer import ids
from belayer.journal.events import FailureDetected
from belayer.journal.store import JournalStore
from belayer.journal.writer import Reader, take_over
from belayer.projections import sandbox, worker

FailureKind = Literal["died", "hung", "unreachable", "gpu", "action-lost"]


async def report_sandbox_failure(
    store: JournalStore, trajectory: str, incarnation: str, kind: FailureKind, evidence: str, by: str
) -> bool:
    """Append FailureDetected to the sandbox's stream; False when it is known already or about another incarnation."""

    def healthy(state: sandbox.SandboxState) -> bool:
        return state.phase == "live" and state.incarnation == incarnation

    stream = ids.sandbox(trajectory)
    if not healthy(sandbox.fold(await Reader(store, stream).catch_up())):
        return False
    writer, history = await take_over(store, stream, by)
    if not healthy(sandbox.fold(history)):
        return False
    await writer.append(FailureDetected(incarnation, kind, evidence, by))
    return True


async def report_engine_failure(
    store: JournalStore, name: str, incarnation: str, kind: FailureKind, evidence: str, by: str
) -> bool:
    """Append FailureDetected to the worker's stream; False when it is known already."""

    def healthy(state: worker.WorkerState) -> bool:
        engine = state.engines.get(incarnation)
        return engine is not None and engine.status in ("starting", "ready")

    stream = ids.worker(name)
    if not healthy(worker.fold(await Reader(store, stream).catch_up())):
        return False
    writer, history = await take_over(store, stream, by)
    if not healthy(worker.fold(history)):
        return False
    await writer.append(FailureDetected(incarnation, kind, evidence, by))
    return True
