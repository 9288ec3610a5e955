"""Whether a server can keep what a durability mode promises; asked over every new link, before anything is written.

Each 'no' is a ServerRefusedError that names what was found and what to do about it.
"""

from __future__ import annotations

import re

import hiredis

from belayer.errors import ServerRefusedError
from belayer.journal.durability import Durability
from belayer.journal.link import Link, LinkLostError, NotReadyError, Reply, pack
from belayer.journal.replies import is_transient

OLDEST = (7, 0)
OLDEST_WITH_WAITAOF = (7, 2)


async def check_server(
    link: Link, address: str, durability: Durability, replicas: int, is_cluster: bool, timeout_s: float
) -> None:
    """Ask the server and judge its answers.

    ServerRefusedError, NotReadyError, or LinkLostError when the link breaks.
    """
    commands = [pack(("INFO",)), pack(("CONFIG", "GET", "appendfsync"))]
    info, config = await link.exchange(commands, len(commands), timeout_s)
    if isinstance(info, hiredis.ReplyError):
        if is_transient(info):
            raise LinkLostError(str(info))
        raise ServerRefusedError(address, "it does not answer INFO", str(info), "allow the user INFO (ACL: +info)")
    facts = parse_info(info)
    if facts.get("loading") == "1":
        raise NotReadyError("the server is still loading its data")
    judge(address, facts, _appendfsync(config), durability, replicas, is_cluster)


def judge(
    address: str,
    info: dict[str, str],
    appendfsync: str | None,
    durability: Durability,
    replicas: int = 0,
    is_cluster: bool = False,
) -> None:
    """ServerRefusedError when the server with these facts cannot keep the mode.

    `appendfsync` None: it did not say. `is_cluster`: the URL's form is that of a cluster.
    """
    version = version_of(info)
    if version < OLDEST:
        raise ServerRefusedError(
            address, "Redis 7.0 or newer is needed", info.get("redis_version", "no version"), "update the server"
        )
    if info.get("redis_mode") == "sentinel":
        raise ServerRefusedError(
            address,
            "it is a Sentinel, not a server",
            "redis_mode sentinel",
            "use redis+sentinel://host:port/master-name",
        )
    if info.get("role") == "slave":
        raise ServerRefusedError(
            address,
            "it is a replica, which takes no writes",
            f"a replica of {info.get('master_host')}:{info.get('master_port')}",
            "name the primary",
        )
    if info.get("cluster_enabled") == "1" and not is_cluster:
        raise ServerRefusedError(
            address,
            "it is a node of a cluster",
            "cluster-enabled yes",
            "name the cluster with redis+cluster://host:port",
        )
    policy = info.get("maxmemory_policy", "unknown")
    if policy != "noeviction":
        raise ServerRefusedError(
            address,
            "it may evict events",
            f"maxmemory-policy {policy}",
            "`redis-cli CONFIG SET maxmemory-policy noeviction`",
        )
    match durability:
        case Durability.MEMORY:
            pass
        case Durability.EVERYSEC:
            _needs_append_only(address, info, appendfsync, durability)
        case Durability.FSYNC:
            _needs_append_only(address, info, appendfsync, durability)
            if version < OLDEST_WITH_WAITAOF:
                raise ServerRefusedError(
                    address,
                    "mode fsync needs WAITAOF",
                    f"version {info.get('redis_version')}",
                    "use Redis 7.2 or newer or any Valkey, or choose mode everysec or replicated",
                )
        case Durability.REPLICATED:
            _needs_append_only(address, info, appendfsync, durability)
            if int(info.get("connected_slaves", 0)) < replicas:
                raise ServerRefusedError(
                    address,
                    f"mode replicated needs {replicas} connected replicas",
                    info.get("connected_slaves", "0"),
                    "connect more replicas, ask for fewer, or choose mode everysec or fsync",
                )


def _needs_append_only(address: str, info: dict[str, str], appendfsync: str | None, mode: Durability) -> None:
    if info.get("aof_enabled") != "1":
        raise ServerRefusedError(
            address,
            f"mode {mode} needs the append-only file",
            "appendonly no",
            "`redis-cli CONFIG SET appendonly yes`, or choose mode memory",
        )
    if appendfsync not in ("everysec", "always"):
        raise ServerRefusedError(
            address,
            f"mode {mode} needs the append-only file synced every second or always",
            f"appendfsync {appendfsync}" if appendfsync else "it does not answer CONFIG GET",
            "`redis-cli CONFIG SET appendfsync everysec`"
            if appendfsync
            else "allow the user CONFIG GET (ACL: +config|get), or choose mode memory",
        )


def parse_info(reply: Reply) -> dict[str, str]:
    """INFO's `name:value` lines."""
    lines = bytes(reply).decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def version_of(info: dict[str, str]) -> tuple[int, int]:
    """Major and minor version as Redis counts them; Valkey says there which Redis it is compatible with."""
    found = re.match(r"(\d+)\.(\d+)", info.get("redis_version", ""))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _appendfsync(reply: Reply) -> str | None:
    if isinstance(reply, list) and len(reply) == 2:  # pyright: ignore[reportUnknownArgumentType]
        return bytes(reply[1]).decode()  # pyright: ignore[reportUnknownArgumentType]
    return None
