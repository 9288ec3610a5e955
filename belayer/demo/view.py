"""A running trajectory and its sandbox as the journal has them, followed live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from belayer import ids
from belayer.demo.waiting import RETRY_S
from belayer.errors import JournalUnavailableError
from belayer.ids import StreamId
from belayer.journal.codec import Recorded
from belayer.journal.events import ActionCommitted, ActionStarted, RecoveryStarted
from belayer.journal.store import JournalStore
from belayer.journal.writer import Reader
from belayer.projections import sandbox as sandbox_projection
from belayer.projections import trajectory as trajectory_projection

_WAIT_S = 5.0


class View:
    """The folded states as of now. `until` wakes up at every change."""

    def __init__(self) -> None:
        self.trajectory = trajectory_projection.EMPTY
        self.sandbox = sandbox_projection.EMPTY
        self.recovered_by = ""
        """Who began the newest recovery of the sandbox."""
        self.commits = 0
        """How many actions have been committed, superseded ones included."""
        self.action_started_ns = 0
        """When the newest action was begun, wall clock."""
        self._changed = asyncio.Condition()

    async def until(self, wanted: Callable[[View], bool], timeout_s: float | None = None) -> bool:
        """True as soon as it is so; False when it was not within the time."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: wanted(self))
        except TimeoutError:
            return False
        return True

    @property
    def ended(self) -> bool:
        return self.trajectory.phase in ("finished", "aborted")

    @property
    def at_ease(self) -> bool:
        """The container lives, the rollout has the trajectory, and no checkpoint is being taken."""
        return (
            self.trajectory.phase == "open"
            and self.sandbox.phase == "live"
            and self.sandbox.open_checkpoint is None
            and self.sandbox.incarnation != ""
        )

    async def see(self, recorded: Recorded) -> None:
        """Take an event in."""
        async with self._changed:
            match recorded.stream.kind:
                case ids.StreamKind.TRAJECTORY:
                    self.trajectory = trajectory_projection.evolve(self.trajectory, recorded.sequence, recorded.event)
                    self.commits += isinstance(recorded.event, ActionCommitted)
                    if isinstance(recorded.event, ActionStarted):
                        self.action_started_ns = recorded.time_ns
                case ids.StreamKind.SANDBOX:
                    self.sandbox = sandbox_projection.evolve(self.sandbox, recorded.sequence, recorded.event)
                    if isinstance(recorded.event, RecoveryStarted):
                        self.recovered_by = recorded.event.recovered_by
                case _:
                    pass
            self._changed.notify_all()


@asynccontextmanager
async def watching(store: JournalStore, name: str) -> AsyncIterator[View]:
    """A view of the trajectory `name` that follows the journal until the block ends."""
    view = View()
    streams = (ids.trajectory(name), ids.sandbox(name))
    tasks = [asyncio.create_task(_follow(store, stream, view)) for stream in streams]
    try:
        yield view
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(store: JournalStore, stream: StreamId, view: View) -> None:
    reader = Reader(store, stream)
    while True:
        try:
            for recorded in await reader.catch_up():
                await view.see(recorded)
            await reader.wait(_WAIT_S)
        except JournalUnavailableError:
            await asyncio.sleep(RETRY_S)
