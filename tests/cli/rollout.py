"""A short rollout for the verbs to look at: one action in a real container, committed and captured."""

from __future__ import annotations

from belayer.actors.checkpointer import Checkpointer
from belayer.actors.sandboxes import create_sandbox, incarnation_of, look
from belayer.client import Trajectory
from belayer.ids import trajectory as trajectory_stream
from belayer.journal.redis_store import RedisStore
from belayer.journal.store import Notice
from belayer.processes import host_name
from belayer.projections.sandbox import SandboxState
from belayer.sandbox.docker_host import DockerHost
from belayer.sandbox.protocol import Action
from tests.actors.test_real import SPEC


async def begin(store: RedisStore, host: DockerHost, run: str, name: str, command: str) -> SandboxState:
    """A trajectory of two tokens and the command, and a checkpoint after it."""
    box = await create_sandbox(store, host, run, name, SPEC, "test")
    assert box.container is not None
    async with await Trajectory.open(store, name) as t:
        await t.start(run, "task", [1])
        await t.begin_generation()
        await t.append_tokens([7, 8], [0.0, 0.0])
        await t.finish_generation("stop")
        number = await t.start_action(command, 30.0, box.incarnation)
        async with await host.attach(incarnation_of(box.container)) as sandbox:
            seen = await sandbox.run(Action(number, command))
        await t.commit_action(seen.exit_status, [], b"", seen.duration_s)
    await Checkpointer(store, host, host_name(), "test").handle(Notice(trajectory_stream(name), "action-committed", ""))
    return await look(store, name)
