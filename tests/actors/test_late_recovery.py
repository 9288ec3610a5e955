"""A recovery that was overtaken while it slept does not touch what others have done since."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from belayer import ids
from belayer.actors.reports import report_sandbox_failure
from belayer.actors.sandbox_recovery import SandboxRecovery
from belayer.actors.sandboxes import create_sandbox, incarnation_of, look
from belayer.client import Trajectory
from belayer.errors import FencedError
from belayer.ids import StreamId, StreamKind
from belayer.journal.codec import Entry
from belayer.journal.events import RecoveryStarted, Rewound, SandboxSpec
from belayer.journal.memory_store import MemoryStore
from belayer.journal.writer import Reader, take_over
from belayer.projections import trajectory
from belayer.sandbox.protocol import Action
from tests.actors.model import ModelHost
from tests.waiting import within


class Interrupted(MemoryStore):
    """Once armed, something else happens just before the next takeover of a trajectory."""

    meanwhile: Callable[[], Awaitable[None]] | None = None

    async def take_over(self, stream: StreamId, after: Entry | None, entry: Entry) -> Entry | None:
        if stream.kind is StreamKind.TRAJECTORY and (meanwhile := self.meanwhile) is not None:
            self.meanwhile = None
            await meanwhile()
        return await super().take_over(stream, after, entry)


async def act(store: MemoryStore, host: ModelHost, command: str) -> None:
    """The rollout goes on by one turn in the container that counts."""
    box = await look(store, "t")
    assert box.container is not None
    t = await Trajectory.open(store, "t")
    await t.begin_generation()
    await t.append_tokens([7], [0.0])
    await t.finish_generation("stop")
    number = await t.start_action(command, 1.0, box.incarnation)
    seen = await (await host.attach(incarnation_of(box.container))).run(Action(number, command))
    await t.commit_action(seen.exit_status, list(seen.output), b"", seen.duration_s)


async def begun(store: MemoryStore, host: ModelHost) -> str:
    """A trajectory of one action whose container has failed; the container's name."""
    t = await Trajectory.open(store, "t")
    await t.start("run", "task", [1])
    box = await create_sandbox(store, host, "run", "t", SandboxSpec("image"), "rollout")
    await act(store, host, "do one")
    await host.remove(box.incarnation)
    await report_sandbox_failure(store, "t", box.incarnation, "died", "gone", "rollout")
    return box.incarnation


async def agrees(store: MemoryStore, host: ModelHost) -> bool:
    """Whether the container has run exactly the actions of the live prefix."""
    prefix = trajectory.fold(await Reader(store, ids.trajectory("t")).catch_up())
    container = host.containers[(await look(store, "t")).incarnation]
    return container.actions == [step.started.command for step in prefix.steps] and prefix.phase == "open"


async def test_a_recovery_that_slept_before_its_fence_does_not_rewind_a_container_that_has_moved_on() -> None:
    store, host = Interrupted(), ModelHost()
    await begun(store, host)
    late = SandboxRecovery(store, host, "host", "actors/late")

    async def another_recovers_and_the_rollout_goes_on() -> None:
        await SandboxRecovery(store, host, "host", "actors/other").recover("t")
        await act(store, host, "do two")

    store.meanwhile = another_recovers_and_the_rollout_goes_on
    try:
        await late.recover("t")
    except FencedError:  # as the actors' loop does
        await late.recover("t")
    assert await agrees(store, host)
    history = [recorded.event for recorded in await Reader(store, ids.trajectory("t")).catch_up()]
    assert sum(isinstance(event, Rewound) for event in history) == 1, "the other's"


async def test_a_trajectory_that_is_called_recovering_beside_a_live_container_goes_on_where_it_is() -> None:
    """As journals of earlier versions may have it."""
    store, host = MemoryStore(), ModelHost()
    failed = await begun(store, host)
    recovery = SandboxRecovery(store, host, "host", "actors/x")
    await recovery.recover("t")
    await act(store, host, "do two")
    writer, _ = await take_over(store, ids.trajectory("t"), "late")
    await writer.append(RecoveryStarted(failed, "restore", "late"))
    await within(recovery.recover("t"))
    assert await agrees(store, host)
