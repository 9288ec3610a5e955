"""Crash, or be overtaken, between any two steps of the rollout, the checkpointer, a recovery or the reaper.

Whatever happens in whatever order, the trajectory ends with the tokens, the observations and the environment of the
undisturbed run, and nothing is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from belayer import ids
from belayer.actors.checkpointer import Checkpointer
from belayer.actors.reaper import Reaper
from belayer.actors.reports import report_sandbox_failure
from belayer.actors.sandbox_recovery import SandboxRecovery
from belayer.actors.sandboxes import create_sandbox, incarnation_of, look
from belayer.client import Trajectory
from belayer.errors import FencedError, SandboxFailedError, WrongSequenceError
from belayer.ids import StreamId
from belayer.journal.codec import Entry
from belayer.journal.events import SandboxSpec
from belayer.journal.memory_store import MemoryStore
from belayer.journal.store import Notice
from belayer.journal.writer import Reader
from belayer.projections import trajectory
from belayer.projections.trajectory import TrajectoryState
from belayer.sandbox.protocol import Action
from replay.audit import audit
from tests.actors.model import CrashError, Fuse, Fused, ModelHost, changes

NAME = "t"
TURNS = 5
TOKENS_A_TURN = 3
SPEC = SandboxSpec("image")


def next_token(context: list[int]) -> int:
    """The model: its next token depends on everything that it was shown."""
    return int.from_bytes(hashlib.blake2b(repr(context).encode(), digest_size=2).digest(), "big")


async def rollout(store, host, turns: int = TURNS) -> None:
    """The rollout code: some turns on from wherever the journal is. It may die at any step."""
    t = await Trajectory.open(store, NAME, chunk_tokens=1, timeout_s=0.0)
    if t.state.phase in ("finished", "aborted"):
        return
    if t.state.phase == "empty":
        await t.start("run", "task", [1, 2, 3])
    box = await look(store, NAME)
    if box.phase == "none":
        box = await create_sandbox(store, host, "run", NAME, SPEC, "rollout")
    if box.container is None or t.state.sandbox_incarnation not in ("", box.incarnation):
        return
    sandbox = await host.attach(incarnation_of(box.container))
    for _ in range(turns):
        if len(list(t.state.steps)) == TURNS:
            break
        await turn(t, sandbox)
    if len(list(t.state.steps)) == TURNS:
        await t.finish("done")


async def turn(t: Trajectory, sandbox) -> None:
    """One generation, unless it has been finished, and the action after it."""
    last = t.state.segments[-1] if t.state.segments else None
    if t.state.action is None and not isinstance(last, trajectory.Generation):
        done = await t.begin_generation("w", "w-1")
        for _ in range(TOKENS_A_TURN - done):
            await t.flush()
            await t.append_tokens([next_token(t.state.context())], [0.0])
        await t.finish_generation("stop")
    last = t.state.context()[-1]
    command = f"{'look' if last % 3 else 'do'} {last}" if t.state.action is None else t.state.action.command
    number = await t.start_action(command, 1.0, sandbox.incarnation.name)
    seen = await sandbox.run(Action(number, command))
    await t.commit_action(seen.exit_status, list(seen.output), b"", seen.duration_s)


async def outcome(store) -> TrajectoryState:
    return trajectory.fold(await Reader(store, ids.trajectory(NAME)).catch_up())


async def journaled(store: MemoryStore) -> list[tuple[StreamId, Entry]]:
    """Everything."""
    return [(stream, entry) for stream in await store.streams() for entry in await store.read(stream)]


def golden() -> tuple[list[int], list[str]]:
    """The context and the environment of the undisturbed run."""

    async def run() -> tuple[list[int], list[str]]:
        store, host = MemoryStore(), ModelHost()
        await rollout(store, host)
        (container,) = host.containers.values()
        return (await outcome(store)).context(), container.actions

    return asyncio.run(run())


GOLDEN_CONTEXT, GOLDEN_ACTIONS = golden()

strikes = st.none() | st.tuples(st.integers(0, 20), st.booleans())
"""Which step of the work is struck (None: no step), and whether after its effect."""


class Anywhere(RuleBasedStateMachine):
    """Rules are who gets to work next, and what strikes whom where."""

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.turns = 1
        self.store, self.host, self.fuse = MemoryStore(), ModelHost(), Fuse()
        self.fused_store, self.fused_host = Fused(self.store, self.fuse), Fused(self.host, self.fuse)

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.turns = TURNS
        try:
            for _ in range(4):
                for work in (self.recovery, self.rollout, self.checkpointer):
                    self.loop.run_until_complete(self.do(work))
            self.loop.run_until_complete(self.do(self.reaper))
            self.check_end()
        finally:
            self.loop.close()

    def check_end(self) -> None:
        state = self.loop.run_until_complete(outcome(self.store))
        assert state.phase in ("finished", "aborted")
        if state.phase == "finished":
            assert state.context() == GOLDEN_CONTEXT
            assert [step.started.command for step in state.steps if changes(step.started.command)] == GOLDEN_ACTIONS
        assert not self.host.containers and not self.host.saved
        assert audit(self.loop.run_until_complete(journaled(self.store))).findings == []

    # --- who can be at work -----------------------------------------------------------------------------------

    async def rollout(self) -> None:
        try:
            await rollout(self.fused_store, self.fused_host, self.turns)
        except SandboxFailedError as error:
            by = "rollout"
            await report_sandbox_failure(self.fused_store, NAME, error.incarnation, "died", error.evidence, by)

    async def checkpointer(self) -> None:
        actor = Checkpointer(self.fused_store, self.fused_host, "host", "checkpointer")
        await actor.handle(Notice(ids.trajectory(NAME), "action-committed", ""))

    async def recovery(self) -> None:
        await SandboxRecovery(self.fused_store, self.fused_host, "host", "recovery").recover(NAME)

    async def reaper(self) -> None:
        actor = Reaper(self.fused_store, self.fused_host, Fused(None, self.fuse), "host", "reaper")
        await actor.handle(Notice(ids.sandbox(NAME), "sandbox-restored", ""))
        await actor.handle(Notice(ids.trajectory(NAME), "trajectory-finished", ""))

    async def do(self, work: Callable[[], Awaitable[None]]) -> None:
        """Let someone work until done, dead or overtaken; those are all the ways it may end."""
        with contextlib.suppress(CrashError, FencedError, WrongSequenceError, TimeoutError):
            await work()
        self.fuse.clear()

    # --- rules ------------------------------------------------------------------------------------------------

    def workers(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {
            "rollout": self.rollout,
            "checkpointer": self.checkpointer,
            "recovery": self.recovery,
            "reaper": self.reaper,
        }

    @rule(who=st.sampled_from(["rollout", "checkpointer", "recovery", "reaper"]), strike=strikes)
    def work_and_maybe_die(self, who: str, strike: tuple[int, bool] | None) -> None:
        async def die() -> None:
            raise CrashError

        if strike is not None:
            self.fuse.set(strike[0], strike[1], die)
        self.loop.run_until_complete(self.do(self.workers()[who]))

    @rule(
        who=st.sampled_from(["rollout", "checkpointer", "recovery", "reaper"]),
        others=st.lists(
            st.sampled_from(["rollout", "checkpointer", "recovery", "reaper", "death"]), min_size=1, max_size=5
        ),
        at=st.integers(0, 20),
        after=st.booleans(),
    )
    def pause_while_others_work(self, who: str, others: list[str], at: int, after: bool) -> None:
        """However long one sleeps: it may have failed and been recovered, and gone on, more than once."""

        async def intrude() -> None:
            for other in others:
                if other == "death":
                    self.kill_container()
                else:
                    await self.do(self.workers()[other])

        self.fuse.set(at, after, intrude)
        self.loop.run_until_complete(self.do(self.workers()[who]))

    @rule()
    def kill_container(self) -> None:
        for container in self.host.containers.values():
            container.alive = False

    @rule()
    def lose_newest_checkpoint(self) -> None:
        """A checkpoint that cannot be restored: the one before it is tried, and at last the initial state."""
        if self.host.saved:
            self.host.saved.pop(list(self.host.saved)[-1])

    @invariant()
    def environment_and_context_agree(self) -> None:
        if not hasattr(self, "store"):
            return
        state = self.loop.run_until_complete(outcome(self.store))
        box = self.loop.run_until_complete(look(self.store, NAME))
        container = self.host.containers.get(box.incarnation)
        live = container is not None and container.alive and box.phase == "live" and state.phase == "open"
        if live and state.sandbox_incarnation in ("", box.incarnation) and container is not None:
            committed = [step.started.command for step in state.steps if changes(step.started.command)]
            assert container.actions[: len(committed)] == committed
            assert len(container.actions) <= len(committed) + (state.action is not None)
            assert container.last - state.boundary.number in (0, int(state.action is not None))


Anywhere.TestCase.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)
TestCrashAnywhere = Anywhere.TestCase
