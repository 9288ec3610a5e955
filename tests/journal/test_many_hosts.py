"""A cluster and three actor hosts, each in a network namespace of its own; one joins, is cut off, leaves, dies.

Notices are divided among the hosts of one consumer group, nobody is needed, and every trajectory is finished once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from belayer import ids
from belayer.journal.connect import open_store
from belayer.journal.events import TrajectoryFinished, TrajectoryStarted
from belayer.journal.redis_store import RedisStore
from belayer.journal.writer import take_over
from tests.journal import actor_host
from tests.journal.faults import stored
from tests.journal.topologies import cluster
from tests.ports import claimed
from tests.waiting import DEADLINE_S, until

ROOT = Path(__file__).parents[2]
HOSTS = 3


class Network:
    """A bridge, the test's address on it, and a network namespace for each host."""

    def __init__(self, tag: str, subnet: int) -> None:
        self._tag = tag
        self._subnet = f"10.213.{subnet}"
        self.ip = f"{self._subnet}.1"

    def make(self) -> None:
        bridge = f"{self._tag}br"
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "addr", "add", f"{self.ip}/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        for host in range(HOSTS):
            inside = ("ip", "netns", "exec", self.namespace(host))
            run("ip", "netns", "add", self.namespace(host))
            run("ip", "link", "add", f"{self._tag}v{host}", "type", "veth", "peer", "name", f"{self._tag}p{host}")
            run("ip", "link", "set", f"{self._tag}v{host}", "master", bridge, "up")
            run("ip", "link", "set", f"{self._tag}p{host}", "netns", self.namespace(host))
            run(*inside, "ip", "addr", "add", f"{self._subnet}.{10 + host}/24", "dev", f"{self._tag}p{host}")
            run(*inside, "ip", "link", "set", f"{self._tag}p{host}", "up")

    def remove(self) -> None:
        for host in range(HOSTS):
            subprocess.run(["ip", "netns", "del", self.namespace(host)], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", f"{self._tag}v{host}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", f"{self._tag}br"], capture_output=True, check=False)

    def namespace(self, host: int) -> str:
        return f"{self._tag}h{host}"

    def cut(self, host: int) -> None:
        """Nothing reaches the host any more; nobody is told."""
        run("ip", "link", "set", f"{self._tag}v{host}", "down")

    def heal(self, host: int) -> None:
        run("ip", "link", "set", f"{self._tag}v{host}", "up")


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def free_subnet() -> int:
    """One of 10.213.1.0/24 and so on that no other test of this machine has; see `tests.ports`."""
    return next(number for number in range(1, 255) if claimed(f"subnet-{number}"))


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network(f"b{os.urandom(4).hex()}", free_subnet())
    try:
        try:
            made.make()
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made
    finally:
        made.remove()


class Host:
    """An actor process in a host's namespace, and what it said that it finished."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: list[str] = []

    async def listen(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.said.append(line.decode().strip())


@contextlib.asynccontextmanager
async def host(network: Network, number: int, url: str) -> AsyncIterator[Host]:
    program = (sys.executable, actor_host.__file__, url, "default", f"host-{number}")
    process = await asyncio.create_subprocess_exec(
        *("ip", "netns", "exec", network.namespace(number)),
        *program,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    made = Host(process)
    listening = asyncio.create_task(made.listen())
    try:
        await until(lambda: "ready" in made.said, what=f"host {number}")
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        await listening


class Work:
    """Trajectories that are started, in batches, for the actors to finish."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self.names: list[str] = []
        self._unfinished: set[str] = set()

    async def start(self, count: int) -> list[str]:
        """The names of so many new ones."""
        names = [f"t{number}" for number in range(len(self.names), len(self.names) + count)]
        self.names += names
        self._unfinished.update(names)

        async def start_one(name: str) -> None:
            writer, _ = await take_over(self._store, ids.trajectory(name), "rollout")
            await writer.append(TrajectoryStarted("run", "task", b""))

        await asyncio.gather(*(start_one(name) for name in names))
        return names

    async def finish(self) -> None:
        """Wait until all are finished, each once."""
        await until(lambda: self._are_finished(), what="the end of all trajectories")
        for name in self.names:
            assert await self._times_finished(name) == 1

    async def until(self, condition: Callable[[], bool]) -> None:
        """Start and finish more until the condition holds: quick hosts may leave nothing of a batch to another."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await self.start(20)
                await self.finish()

    async def _are_finished(self) -> bool:
        for name in list(self._unfinished):
            if not await self._times_finished(name):
                return False
            self._unfinished.discard(name)
        return True

    async def _times_finished(self, name: str) -> int:
        events = await stored(self._store, ids.trajectory(name))
        return sum(isinstance(recorded.event, TrajectoryFinished) for recorded in events)


async def test_hosts_that_join_leave_die_and_are_cut_off(tmp_path: Path, network: Network) -> None:
    async with cluster(tmp_path / "c", ip=network.ip) as made, contextlib.AsyncExitStack() as hosts:
        store = await open_store(made.url, timeout_s=DEADLINE_S)
        work = Work(store)
        first = await hosts.enter_async_context(host(network, 0, made.url))
        second = await hosts.enter_async_context(host(network, 1, made.url))
        await work.start(20)
        third = await hosts.enter_async_context(host(network, 2, made.url))
        await work.until(lambda: len(second.said) > 1 and len(third.said) > 1)
        network.cut(0)
        unreachable = set(await work.start(15))
        await work.finish()
        assert not unreachable & set(first.said)

        os.kill(second.process.pid, signal.SIGTERM)
        await until(lambda: "left" in second.said, what="the one that leaves")
        network.heal(0)
        before = len(first.said)
        await work.until(lambda: len(first.said) > before)
        third.process.kill()
        await work.start(10)
        await work.finish()
        finished = [name for each in (first, second, third) for name in each.said if name not in ("ready", "left")]
        assert len(finished) == len(set(finished))
        await store.close()
