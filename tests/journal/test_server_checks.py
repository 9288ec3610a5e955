"""A server that cannot keep a mode is refused before anything is written, with what was found and the remedy."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from belayer.errors import ServerRefusedError
from belayer.journal.connect import open_store
from belayer.journal.durability import PROMISES, Durability
from belayer.journal.embedded import EmbeddedServer, shipped_server
from belayer.journal.server_checks import judge, version_of
from tests.journal.faults import command, generation, stored, written
from tests.ports import free_port
from tests.waiting import DEADLINE_S, until

FIT = {
    "redis_version": "8.0.2",
    "role": "master",
    "maxmemory_policy": "noeviction",
    "aof_enabled": "1",
    "connected_slaves": "2",
}
REFUSED = {
    "too old": ({"redis_version": "6.2.14"}, "everysec", Durability.MEMORY, "6.2.14", "update"),
    "no version": ({"redis_version": ""}, "everysec", Durability.MEMORY, "", "update"),
    "replica": (
        {"role": "slave", "master_host": "h", "master_port": "1"},
        "everysec",
        Durability.MEMORY,
        "a replica of h:1",
        "name the primary",
    ),
    "cluster": ({"cluster_enabled": "1"}, "everysec", Durability.MEMORY, "cluster-enabled yes", "redis+cluster://"),
    "sentinel": ({"redis_mode": "sentinel"}, None, Durability.MEMORY, "redis_mode sentinel", "redis+sentinel://"),
    "evicts": (
        {"maxmemory_policy": "allkeys-lru"},
        "everysec",
        Durability.MEMORY,
        "maxmemory-policy allkeys-lru",
        "CONFIG SET maxmemory-policy noeviction",
    ),
    "no file": ({"aof_enabled": "0"}, "everysec", Durability.EVERYSEC, "appendonly no", "CONFIG SET appendonly yes"),
    "never synced": ({}, "no", Durability.EVERYSEC, "appendfsync no", "CONFIG SET appendfsync everysec"),
    "silent": ({}, None, Durability.EVERYSEC, "CONFIG GET", "ACL"),
    "no WAITAOF": ({"redis_version": "7.0.15"}, "always", Durability.FSYNC, "7.0.15", "Redis 7.2"),
    "no replicas": ({"connected_slaves": "1"}, "everysec", Durability.REPLICATED, "1", "connect more replicas"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unfit_server_is_refused(name: str) -> None:
    facts, appendfsync, durability, found, remedy = REFUSED[name]
    with pytest.raises(ServerRefusedError) as caught:
        judge("redis://h:1", FIT | facts, appendfsync, durability, replicas=2)
    assert caught.value.found.endswith(found)
    assert remedy in caught.value.remedy
    assert caught.value.address == "redis://h:1"


@pytest.mark.parametrize("durability", Durability)
def test_a_fit_server_is_not(durability: Durability) -> None:
    assert judge("redis://h:1", FIT, "everysec", durability, replicas=2) is None
    assert PROMISES[durability].endswith(".")


def test_valkey_says_which_redis_it_is() -> None:
    assert version_of({"redis_version": "7.2.4", "valkey_version": "8.1.8"}) == (7, 2)


async def test_a_real_server_is_asked(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "r") as server:
        await command(server.url, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        with pytest.raises(ServerRefusedError, match="maxmemory-policy allkeys-lru"):
            await open_store(server.url, durability="memory")
        await command(server.url, "CONFIG", "SET", "maxmemory-policy", "noeviction", "appendonly", "no")
        with pytest.raises(ServerRefusedError, match="appendonly no"):
            await open_store(server.url)
        store = await open_store(server.url, durability="memory")
        assert store.durability == "memory"
        await store.close()


async def test_mode_fsync_needs_a_server_that_has_it(tmp_path: Path) -> None:
    shipped = shipped_server()
    async with EmbeddedServer(tmp_path / "r", executable=shipped, settings={"appendfsync": "always"}) as server:
        store = await open_store(server.url, durability="fsync")
        await written(store)
        assert len(await stored(store)) == 4
        await store.close()


async def test_mode_replicated_waits_for_its_replicas(tmp_path: Path) -> None:
    port = free_port()
    at_once = {"repl-diskless-sync-delay": "0"}
    async with (
        EmbeddedServer(tmp_path / "a", port=port, settings=at_once) as primary,
        EmbeddedServer(tmp_path / "b") as replica,
    ):
        with pytest.raises(ServerRefusedError, match="needs 1 connected replicas"):
            await open_store(primary.url, durability="replicated")
        await command(replica.url, "REPLICAOF", "127.0.0.1", str(port))
        await until(lambda: is_followed(primary.url), what="replication")
        store = await open_store(primary.url, durability="replicated", timeout_s=DEADLINE_S)
        writer = await written(store)
        os.kill(replica.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(writer.append(generation(9)))
        await asyncio.wait([waiting], timeout=0.2)
        assert not waiting.done()
        os.kill(replica.pid, signal.SIGCONT)
        assert await waiting == 5
        assert len(await stored(store)) == 5
        await store.close()
        with pytest.raises(ServerRefusedError, match="it is a replica"):
            await open_store(replica.url)


async def is_followed(url: str) -> bool:
    return b"state=online" in await command(url, "INFO", "replication")
