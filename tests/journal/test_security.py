"""The users of docs/security.md on a real server: they can do all that they need, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from belayer import ids
from belayer.actors.archiver import Archiver
from belayer.client import Trajectory, wait_resumed
from belayer.errors import ServerRefusedError
from belayer.journal.archive import open_archive
from belayer.journal.archive_upkeep import prune, verify
from belayer.journal.connect import open_store
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.events import FailureDetected, RecoveryStarted, SandboxRemoved, TrajectoryResumed
from belayer.journal.server_checks import parse_info
from belayer.journal.store import JournalStore
from belayer.journal.writer import take_over
from tests.archives import write_trajectory
from tests.journal.acl import ACTORS, ROLLOUT, allowed, server_with_users, url_of
from tests.journal.faults import command
from tests.waiting import DEADLINE_S, until

LOGIN = {"auth"}
"""Every user may."""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    async with server_with_users(tmp_path / "s") as running:
        yield running


async def used(server: EmbeddedServer) -> set[str]:
    """The commands that were called since the statistics were reset, but those by which we ask."""
    stats = parse_info(await command(server.url, "INFO", "commandstats"))
    names = {name.removeprefix("cmdstat_") for name, value in stats.items() if not value.startswith("calls=0,")}
    return names - LOGIN - {"config|resetstat"}


async def wait_twice(store: JournalStore, server: EmbeddedServer) -> None:
    """A second wait that has to interrupt the first one's, and a quiet second: what is held is looked after."""
    waiting = [asyncio.create_task(store.wait(ids.trajectory("never"), 0, 0.5))]

    async def blocks() -> bool:
        return int(parse_info(await command(server.url, "INFO", "clients"))["blocked_clients"]) > 0

    await until(blocks, what="a blocked XREAD")
    waiting.append(asyncio.create_task(store.wait(ids.trajectory("never-either"), 0, 0.5)))
    assert await asyncio.gather(*waiting) == [False, False]

    async def pinged() -> bool:
        return "ping" in await used(server)

    await until(pinged, what="a PING")


async def assert_all_and_only(server: EmbeddedServer, user: str) -> None:
    """Every allowed command was called, nothing was refused."""
    assert await used(server) == allowed(user)
    assert await command(server.url, "ACL", "LOG") == []


async def test_a_rollout_needs_what_its_user_may_and_nothing_more(server: EmbeddedServer) -> None:
    await command(server.url, "CONFIG", "RESETSTAT")
    store = await open_store(url_of(server, ROLLOUT), namespace="night", timeout_s=DEADLINE_S)
    trajectory = await Trajectory.open(store, "t")
    await trajectory.start("run", "task", [1, 2, 3])
    await trajectory.begin_generation("w", "w-1")
    await trajectory.append_tokens([1, 2], [-0.5, -0.5])
    await trajectory.finish_generation("stop")
    await trajectory.start_action("true", 1.0, "i")
    await trajectory.commit_action(0, [4], bytes(16), 0.1)
    other, _ = await take_over(store, ids.trajectory("t"), "recovery")
    await other.append(FailureDetected("i", "died", "gone", "x"), RecoveryStarted("i", "plan", "x"))
    resumed = asyncio.create_task(wait_resumed(store, "t", 10.0))
    await wait_twice(store, server)
    await other.append(TrajectoryResumed(1, trajectory.state.boundary.sequence, "i-2"))
    await resumed
    trajectory = await Trajectory.open(store, "t")
    await trajectory.finish("done", 1.0)
    await store.close()
    await assert_all_and_only(server, ROLLOUT)


async def test_actors_need_what_their_user_may_and_nothing_more(server: EmbeddedServer, tmp_path: Path) -> None:
    await command(server.url, "CONFIG", "RESETSTAT")
    store = await open_store(url_of(server, ACTORS), namespace="night", timeout_s=DEADLINE_S)
    async with store.subscribe("detector@h", "dead", 0.05) as dead, store.subscribe("detector@h", "c", 0.05) as notices:
        writer = await write_trajectory(store, "t")
        late = await dead.next(DEADLINE_S)
        assert late is not None
        assert sum(group.pending for group in await store.groups()) >= 1
        await dead.renew(late)
        notice = None
        while notice is None or notice.stream != late.stream or notice.tag != late.tag:
            notice = await notices.next(DEADLINE_S)
            assert notice is not None
            await notices.done(notice)
    box, _ = await take_over(store, ids.sandbox("t"), "reaper")
    await box.append(SandboxRemoved("i-1", "over"))
    trajectory = await Trajectory.open(store, "t")
    await trajectory.finish("done", 1.0)
    assert not await store.wait(writer.stream, 100, 0.1)
    await wait_twice(store, server)
    archive = open_archive(str(tmp_path / "archive"), "night")
    assert await Archiver(store, archive, "archiver").archive(["t"]) == {"t": None}
    assert (await verify(archive, store)).problems == []
    pruned = await prune(archive, store, datetime.now(UTC) + timedelta(days=2), older_than=timedelta(days=1))
    assert (pruned.streams, await store.streams()) == (2, [])
    await store.close()
    await assert_all_and_only(server, ACTORS)


@pytest.mark.parametrize("user", [ROLLOUT, ACTORS])
async def test_nothing_else_is_allowed(tmp_path: Path, user: str) -> None:
    async with server_with_users(tmp_path / "s", "night:") as server:
        url = url_of(server, user)
        for forbidden in (
            ("FLUSHALL",),
            ("KEYS", "*"),
            ("DEL", "{belayer:night:0}:s:trajectory/t"),
            ("XTRIM", "{belayer:night:0}:s:trajectory/t", "MAXLEN", "0"),
            ("XDEL", "{belayer:night:0}:s:trajectory/t", "1-1"),
            ("XSETID", "{belayer:night:0}:s:trajectory/t", "9-9"),
            ("RENAME", "{belayer:night:0}:names", "{belayer:night:0}:other"),
            ("CONFIG", "SET", "maxmemory", "1"),
            ("SHUTDOWN",),
            ("ACL", "LIST"),
            ("SCRIPT", "FLUSH"),
            ("REPLICAOF", "NO", "ONE"),
            ("MODULE", "LIST"),
            ("MONITOR",),
            ("CLIENT", "LIST"),
            ("PUBLISH", "channel", "x"),
            ("XADD", "{belayer:day:0}:s:trajectory/t", "1-1", "e", "x"),
            ("GET", "someone-elses"),
            ("EVAL", "return redis.call('DEL', KEYS[1])", "1", "{belayer:night:0}:names"),
        ):
            with pytest.raises(ServerRefusedError, match=r"NOPERM|No permissions|can't run this command") as caught:
                await command(url, *forbidden)
            assert "docs/security.md" in str(caught.value)
        with pytest.raises(ServerRefusedError, match="NOPERM"):
            await open_store(url, namespace="day")
        store = await open_store(url, namespace="night")
        await take_over(store, ids.trajectory("t"), "a")
        await store.close()


async def test_a_rollout_cannot_remove_trim_or_take_notices(server: EmbeddedServer) -> None:
    store = await open_store(url_of(server, ROLLOUT), namespace="night", timeout_s=DEADLINE_S)
    writer, _ = await take_over(store, ids.trajectory("t"), "a")
    entry = await store.last(writer.stream)
    assert entry is not None
    with pytest.raises(ServerRefusedError, match="unlink"):
        await store.remove(writer.stream)
    with pytest.raises(ServerRefusedError, match="xgroup"):
        async with store.subscribe("g", "c"):
            pass
    await take_over(store, ids.trajectory("t"), "b")
    last = await store.last(writer.stream)
    assert last is not None
    with pytest.raises(ServerRefusedError, match="can't run this command"):
        await store.trim(writer.stream, last)
    assert len(await store.read(writer.stream)) == 2
    await store.close()
