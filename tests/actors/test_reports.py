"""A failure is reported once, and a report that comes late takes nothing from the recovery under way."""

import asyncio
from collections.abc import Awaitable, Callable

from belayer import ids
from belayer.actors.reports import report_sandbox_failure
from belayer.actors.sandboxes import create_sandbox, look
from belayer.ids import StreamId
from belayer.journal.codec import Entry
from belayer.journal.events import FailureDetected, RecoveryStarted, SandboxSpec
from belayer.journal.memory_store import MemoryStore
from belayer.journal.writer import Reader, take_over
from tests.actors.model import ModelHost

NAME = "t"


class SlowTakeOver(MemoryStore):
    """A store on which somebody else gets in between a look and a takeover, once."""

    between: Callable[[], Awaitable[None]] | None = None

    async def take_over(self, stream: StreamId, after: Entry | None, entry: Entry) -> Entry | None:
        between, self.between = self.between, None
        if between is not None:
            await between()
        return await super().take_over(stream, after, entry)


async def failures(store: MemoryStore) -> int:
    history = await Reader(store, ids.sandbox(NAME)).catch_up()
    return sum(isinstance(recorded.event, FailureDetected) for recorded in history)


async def test_a_failure_is_reported_once() -> None:
    store = MemoryStore()
    box = await create_sandbox(store, ModelHost(), "run", NAME, SandboxSpec("image"), "rollout")
    said = await asyncio.gather(
        *(report_sandbox_failure(store, NAME, box.incarnation, "died", "", by) for by in ("one", "two", "three"))
    )
    assert sum(said) == 1 and await failures(store) == 1
    assert not await report_sandbox_failure(store, NAME, "another", "died", "", "one")


async def test_a_late_report_does_not_fence_the_recovery_off() -> None:
    store = SlowTakeOver()
    box = await create_sandbox(store, ModelHost(), "run", NAME, SandboxSpec("image"), "rollout")

    async def recover() -> None:
        recovery, _ = await take_over(store, ids.sandbox(NAME), "recovery")
        failed = FailureDetected(box.incarnation, "died", "", "detector")
        await recovery.append(failed, RecoveryStarted(box.incarnation, "", "recovery"))

    store.between = recover
    assert not await report_sandbox_failure(store, NAME, box.incarnation, "died", "", "rollout")
    assert store.between is None, "it came in between"
    assert (await look(store, NAME)).writer == "recovery" and await failures(store) == 1
