"""Real clusters and Sentinel set-ups for tests, each in a folder of its own; nodes know each other from the start."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from belayer import processes
from belayer.journal import supervise
from belayer.journal.embedded import EmbeddedServer, find_server
from belayer.journal.server_checks import parse_info
from tests.journal.faults import command
from tests.ports import free_port
from tests.waiting import until

SLOTS = 16384


class ClusterNode(EmbeddedServer):
    """One node of a cluster. `number` makes its id; `ip` is where the others and its clients find it."""

    def __init__(self, folder: Path, number: int, settings: dict[str, str], executable: Path | None, ip: str) -> None:
        self.ip = ip
        self.node_id = hashlib.sha1(str(number).encode()).hexdigest()
        self.bus_port = free_port()
        own = {"cluster-enabled": "yes", "cluster-port": str(self.bus_port), "cluster-node-timeout": "1000"}
        own |= {"bind": ip, "cluster-announce-ip": ip, "protected-mode": "no", "shutdown-timeout": "0"}
        super().__init__(folder, port=free_port(), settings=own | settings, executable=executable)

    def line(self, flags: str, master: str, slots: str) -> str:
        return f"{self.node_id} {self.ip}:{self.port}@{self.bus_port} {flags} {master} 0 0 1 connected {slots}"


class Cluster:
    """Primaries with equal shares of the slots, and as many replicas of each as wanted."""

    def __init__(self, primaries: Sequence[ClusterNode], replicas: Sequence[ClusterNode]) -> None:
        self.primaries = primaries
        self.replicas = replicas
        """Number i is one of primary i modulo their number."""

    @property
    def nodes(self) -> list[ClusterNode]:
        return [*self.primaries, *self.replicas]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"{node.ip}:{node.port}" for node in self.primaries)

    async def owner(self, slot: int) -> ClusterNode:
        """The node that says itself that it serves the slot."""
        for node in self.nodes:
            for first, last, primary, *_ in await command(node.url, "CLUSTER", "SLOTS"):
                if first <= slot <= last and primary[2].decode() == node.node_id:
                    return node
        raise AssertionError(f"nobody has slot {slot}")


class SlotMove:
    """Moves one slot by hand, as an operator's tool would, in steps: `begin`, any number of `move`s, `finish`."""

    def __init__(self, made: Cluster, slot: int, source: ClusterNode, target: ClusterNode) -> None:
        self._made = made
        self._slot = str(slot)
        self._source = source
        self._target = target

    async def begin(self) -> None:
        await command(self._target.url, "CLUSTER", "SETSLOT", self._slot, "IMPORTING", self._source.node_id)
        await command(self._source.url, "CLUSTER", "SETSLOT", self._slot, "MIGRATING", self._target.node_id)

    async def move(self, *keys: str) -> None:
        port = str(self._target.port)
        await command(self._source.url, "MIGRATE", self._target.ip, port, "", "0", "5000", "KEYS", *keys)

    async def keys(self, most: int = 1000) -> list[str]:
        """Keys that have not moved yet."""
        found = await command(self._source.url, "CLUSTER", "GETKEYSINSLOT", self._slot, str(most))
        return [bytes(key).decode() for key in found]

    async def finish(self) -> None:
        """Move what is left, one key at a time, and tell everybody who has the slot now."""
        while keys := await self.keys(1):
            await self.move(*keys)
        others = [node for node in self._made.primaries if node not in (self._source, self._target)]
        for node in (self._target, self._source, *others):
            await command(node.url, "CLUSTER", "SETSLOT", self._slot, "NODE", self._target.node_id)


@contextlib.asynccontextmanager
async def detached(primary: EmbeddedServer, replica: EmbeddedServer) -> AsyncIterator[None]:
    """Meanwhile what is written to the primary does not reach the replica; at the end the primary is dead."""
    os.kill(replica.pid, signal.SIGSTOP)
    await command(primary.url, "CLIENT", "KILL", "TYPE", "replica")
    try:
        yield
        await primary.kill()
    finally:
        os.kill(replica.pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def cluster(
    folder: Path,
    primaries: int = 3,
    replicas_each: int = 0,
    settings: dict[str, str] | None = None,
    executable: Path | None = None,
    ip: str = "127.0.0.1",
) -> AsyncIterator[Cluster]:
    """A running cluster; the 2 s that a node waits before it takes writes are Redis's own."""
    folder.mkdir(exist_ok=True)
    count = primaries * (1 + replicas_each)
    nodes = [ClusterNode(folder / f"n{number}", number, settings or {}, executable, ip) for number in range(count)]
    made = Cluster(nodes[:primaries], nodes[primaries:])
    for node in nodes:
        lines: list[str] = []
        for number, other in enumerate(nodes):
            me = "myself," if other is node else ""
            if number < primaries:
                first, end = (SLOTS * edge // primaries for edge in (number, number + 1))
                lines.append(other.line(f"{me}master", "-", f"{first}-{end - 1}"))
            else:
                lines.append(other.line(f"{me}slave", nodes[number % primaries].node_id, ""))
        node.folder.mkdir()
        (node.folder / "nodes.conf").write_text("\n".join([*lines, "vars currentEpoch 1 lastVoteEpoch 0\n"]))
    async with contextlib.AsyncExitStack() as stack:
        await asyncio.gather(*(stack.enter_async_context(node) for node in nodes))
        await until(lambda: is_whole(made), what="the cluster")
        yield made


async def is_whole(made: Cluster) -> bool:
    """Whether every node says that the cluster is well and every replica follows."""
    for node in made.nodes:
        if b"cluster_state:ok" not in await command(node.url, "CLUSTER", "INFO"):
            return False
    for node in made.replicas:
        if b"master_link_status:up" not in await command(node.url, "INFO", "replication"):
            return False
    return True


class Sentinel:
    """One sentinel process. It never takes a busy server for a dead one: tests say when to fail over."""

    def __init__(self, folder: Path, primary_port: int, quorum: int, executable: Path | None = None) -> None:
        self.folder = folder
        self.port = free_port()
        self._executable = executable or find_server()
        self._supervisor: asyncio.subprocess.Process | None = None
        self.folder.mkdir(parents=True)
        self.conf = folder / "sentinel.conf"
        self.conf.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {folder}\nlogfile {folder}/sentinel.log\n"
            f"sentinel monitor journal 127.0.0.1 {primary_port} {quorum}\n"
            "sentinel down-after-milliseconds journal 60000\nsentinel failover-timeout journal 10000\n"
        )

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Sentinel:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        supervisor = str(Path(supervise.__file__))
        program = [str(self._executable), str(self.conf), "--sentinel"]
        self._supervisor = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", supervisor, str(os.getpid()), "", "--", *program, stdout=asyncio.subprocess.PIPE
        )
        assert self._supervisor.stdout is not None
        self.pid = int(await self._supervisor.stdout.readline())
        await until(lambda: accepts(self.port), what="the sentinel")
        # Not PING-PERIOD too: five of them is how old a replica's INFO may be, which comes once a second in a failover.
        fast = ("INFO-PERIOD", "200", "ASK-PERIOD", "100", "PUBLISH-PERIOD", "200")
        patient = ("TILT-TRIGGER", "20000", "TILT-PERIOD", "1000")  # else a busy machine stops failovers for 30 s
        await command(self.url, "SENTINEL", "DEBUG", *fast, *patient)

    async def stop(self) -> None:
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            await processes.kill(self.pid, processes.start_ticks(self.pid))
            await supervisor.wait()


async def accepts(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


class Sentineled:
    """Servers of which one is the primary, and the sentinels that watch them."""

    def __init__(self, servers: Sequence[EmbeddedServer], sentinels: Sequence[Sentinel]) -> None:
        self.servers = servers
        self.sentinels = sentinels

    @property
    def url(self) -> str:
        return "redis+sentinel://" + ",".join(f"127.0.0.1:{s.port}" for s in self.sentinels) + "/journal"

    async def primary(self) -> EmbeddedServer:
        """The server that most sentinels name now."""
        named: list[int] = []
        for sentinel in self.sentinels:
            _, port = await command(sentinel.url, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "journal")
            named.append(int(port))
        return next(server for server in self.servers if server.port == max(named, key=named.count))

    async def fail_over(self, to: EmbeddedServer) -> None:
        """As if the sentinels had found the primary dead: returns once each of them names the other server."""
        await until(lambda: self._failed_over(to), what="the failover")

    async def _failed_over(self, to: EmbeddedServer) -> bool:
        first = Sentineled(self.servers, self.sentinels[:1])
        if await first.primary() is not to:  # refused while one is under way, and until the replica has answered
            await command(
                first.sentinels[0].url, "SENTINEL", "FAILOVER", "journal", refusable=("INPROG", "NOGOODSLAVE")
            )
        return all([await Sentineled(self.servers, [each]).primary() is to for each in self.sentinels])


@contextlib.asynccontextmanager
async def sentineled(
    folder: Path,
    replicas: int = 1,
    sentinels: int = 3,
    settings: dict[str, str] | None = None,
    executable: Path | None = None,
) -> AsyncIterator[Sentineled]:
    """A primary, its replicas and sentinels that have all found each other."""
    folder.mkdir(exist_ok=True)
    ports = [free_port() for _ in range(1 + replicas)]
    quick = {"repl-diskless-sync-delay": "0", "repl-ping-replica-period": "1", "shutdown-timeout": "0"} | (
        settings or {}
    )
    async with contextlib.AsyncExitStack() as stack:
        servers: list[EmbeddedServer] = []
        for number, port in enumerate(ports):
            follows = {"replicaof": f"127.0.0.1 {ports[0]}"} if number else {}
            server = EmbeddedServer(folder / f"r{number}", port=port, settings=quick | follows, executable=executable)
            servers.append(await stack.enter_async_context(server))
        await until(lambda: follow(servers[0], replicas), what="the replicas")
        watching = [Sentinel(folder / f"s{number}", ports[0], sentinels // 2 + 1) for number in range(sentinels)]
        await asyncio.gather(*(stack.enter_async_context(sentinel) for sentinel in watching))
        made = Sentineled(servers, watching)
        await until(lambda: know_each_other(made), what="the sentinels")
        yield made


async def follow(primary: EmbeddedServer, count: int) -> bool:
    """Whether so many replicas are in step with the primary."""
    info = await command(primary.url, "INFO", "replication")
    return info.count(b"state=online") == count


async def in_step(primary: EmbeddedServer, replica: EmbeddedServer) -> bool:
    """Whether the replica has all that the primary has."""
    infos = [parse_info(await command(server.url, "INFO", "replication")) for server in (primary, replica)]
    return infos[0]["master_repl_offset"] == infos[1].get("slave_repl_offset")


async def know_each_other(made: Sentineled) -> bool:
    """Whether every sentinel knows all replicas and all other sentinels."""
    for sentinel in made.sentinels:
        reply = [bytes(part) for part in await command(sentinel.url, "SENTINEL", "MASTER", "journal")]
        facts = dict(zip(reply[::2], reply[1::2], strict=True))
        if int(facts[b"num-slaves"]) < len(made.servers) - 1:
            return False
        if int(facts[b"num-other-sentinels"]) < len(made.sentinels) - 1:
            return False
    return True
