"""What a SandboxSpec asks of Docker besides the image: checked before a container is made, then in Docker's words."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from belayer.errors import InputError
from belayer.journal.events import SandboxSpec

NETWORKS = ("none", "bridge")
RESERVED = ("/", "/proc", "/sys", "/dev", "/.belayer")
"""Where nothing may be mounted: Docker, CRIU or the runner need what is there."""


def check(spec: SandboxSpec) -> None:
    """InputError that names the part of the spec that cannot be used."""
    if spec.network not in NETWORKS:
        raise InputError(f"the sandbox's network {spec.network!r} is none of {', '.join(NETWORKS)}")
    user, _, group = spec.user.partition(":")
    if spec.user and not (user and (not group or group.isdecimal()) and not spec.user.endswith(":")):
        raise InputError(f"the sandbox's user {spec.user!r} is not a name, a uid or uid:gid")
    for bind in spec.binds:
        parts = bind.split(":")
        if len(parts) not in (2, 3) or not parts[0] or parts[2:] not in ([], ["ro"], ["rw"]):
            raise InputError(f"the sandbox's bind {bind!r} is not SOURCE:TARGET or SOURCE:TARGET:ro")
    for target in (*(bind.split(":")[1] for bind in spec.binds), *spec.tmpfs):
        path = PurePosixPath(target)
        reserved = any(path == PurePosixPath(one) or (one != "/" and path.is_relative_to(one)) for one in RESERVED)
        if not path.is_absolute() or ".." in path.parts or reserved:
            raise InputError(f"nothing can be mounted at {target!r} in a sandbox; name a folder of its own")


def mounts(spec: SandboxSpec) -> list[dict[str, Any]]:
    """The binds, as Docker's API wants them."""
    made: list[dict[str, Any]] = []
    for source, target, *mode in (bind.split(":") for bind in spec.binds):
        kind = "bind" if source.startswith("/") else "volume"
        made.append({"Type": kind, "Source": source, "Target": target, "ReadOnly": mode == ["ro"]})
    return made


def host_config(spec: SandboxSpec) -> dict[str, Any]:
    """The limits, the network and the file systems, as docker-py's create_host_config wants them."""
    config: dict[str, Any] = {"network_mode": spec.network, "read_only": spec.read_only}
    if spec.memory_bytes is not None:
        config["mem_limit"] = spec.memory_bytes
    if spec.cpus is not None:
        config["nano_cpus"] = int(spec.cpus * 1e9)
    if spec.tmpfs:
        config["tmpfs"] = dict.fromkeys(spec.tmpfs, "exec,mode=1777")
    return config
