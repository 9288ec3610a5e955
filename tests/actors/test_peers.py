"""An actor process that is killed: what it had at hand comes at once to another of its host, to one elsewhere never."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from belayer import ids
from belayer.actors.peers import Peers
from belayer.journal.events import TrajectoryStarted
from belayer.journal.memory_store import MemoryStore
from belayer.journal.redis_store import RedisStore
from belayer.journal.store import JournalStore
from belayer.journal.writer import take_over
from tests.actors.holder import STALE_AFTER_S as LEASE_S
from tests.waiting import DEADLINE_S, until

HOST = "my-host"
OFTEN_S = 0.02


async def noticed(store: JournalStore, name: str) -> None:
    writer, _ = await take_over(store, ids.trajectory(name), "a")
    await writer.append(TrajectoryStarted("run", "task", b""))


@asynccontextmanager
async def process(*command: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A process; gone, whatever it does, at the end of the block."""
    started = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        yield started
    finally:
        await killed(started)


async def killed(victim: asyncio.subprocess.Process) -> None:
    if victim.returncode is None:
        victim.send_signal(signal.SIGKILL)
    await victim.wait()


async def taken(holder: asyncio.subprocess.Process, count: int) -> set[str]:
    """The names of the next so many trajectories whose notices the process took."""
    assert holder.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        return {(await holder.stdout.readline()).decode().strip() for _ in range(count)}


async def test_what_a_killed_process_had_comes_to_the_others_of_its_host(
    redis_url: str, redis_store: RedisStore, namespace: str
) -> None:
    """Nothing goes stale here: the lease is many minutes long."""
    command = (sys.executable, "-m", "tests.actors.holder", redis_url, namespace, HOST)
    async with process(*command) as first:
        await noticed(redis_store, "t")
        await noticed(redis_store, "u")
        assert await taken(first, 2) == {"t", "u"}
        async with process(*command) as second:
            await killed(first)
            assert await taken(second, 2) == {"t", "u"}
            await noticed(redis_store, "v")
            assert await taken(second, 1) == {"v"}
            await killed(second)
        async with process(*command) as third:  # nobody was there to see the second one die
            assert await taken(third, 3) == {"t", "u", "v"}


async def test_it_comes_when_its_process_ends_and_not_before() -> None:
    store = MemoryStore()
    await noticed(store, "t")
    async with process("sleep", "1000") as holder, store.subscribe("g", "heir", LEASE_S) as heir:
        async with store.subscribe("g", f"{HOST}-{holder.pid}-abc", LEASE_S) as held:
            assert await held.next(DEADLINE_S) is not None
        async with Peers(HOST, "heir").inheriting(heir, OFTEN_S):
            assert await heir.next(10 * OFTEN_S) is None
            await killed(holder)
            assert await heir.next(DEADLINE_S) is not None


async def test_one_process_watches_for_all_its_groups() -> None:
    """Who was seen with a notice in one group is watched at once in the other, where nobody has looked since."""
    store = MemoryStore()
    peers = Peers(HOST, "heir")
    async with (
        process("sleep", "1000") as holder,
        store.subscribe("seldom", "heir", LEASE_S) as seldom,
        store.subscribe("often", "heir", LEASE_S) as often,
        peers.inheriting(seldom, LEASE_S),
        peers.inheriting(often, OFTEN_S),
    ):
        await noticed(store, "t")
        for group in ("seldom", "often"):
            async with store.subscribe(group, f"{HOST}-{holder.pid}-abc", LEASE_S) as held:
                assert await held.next(DEADLINE_S) is not None
        await until(lambda: peers.watched, what="the peer is seen")
        await killed(holder)
        assert await seldom.next(DEADLINE_S) is not None
        assert await often.next(DEADLINE_S) is not None


async def test_the_dead_of_another_host_keep_theirs_until_they_are_stale() -> None:
    store = MemoryStore()
    await noticed(store, "t")
    async with process("true") as gone:
        await gone.wait()
    async with store.subscribe("g", f"elsewhere-{gone.pid}-abc", LEASE_S) as held:
        assert await held.next(DEADLINE_S) is not None
    async with (
        store.subscribe("g", "heir", LEASE_S) as heir,
        Peers(HOST, "heir").inheriting(heir, OFTEN_S),
    ):
        assert await heir.next(10 * OFTEN_S) is None
        assert await heir.holders() == [f"elsewhere-{gone.pid}-abc"]
