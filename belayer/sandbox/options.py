"""What a SandboxSpec asks of Docker besides the image: checked before a container is made, then in Docker's words."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from belayer.errors import InputError
from belayer.journal.events import SandboxSpec

NETWORKS = ("none", "bridge")
RESERVED = ("/", "/proc", "/sys", "/dev", "/.belayer")
"""Where nothing may be mounted: Docker, CRIU or the runner need what is there."""
DEFAULT_CAPABILITIES = frozenset(
    (
        "AUDIT_WRITE",
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "MKNOD",
        "NET_BIND_SERVICE",
        "NET_RAW",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_CHROOT",
    )
)
MORE_CAPABILITIES = frozenset(("IPC_LOCK", "SYS_NICE", "SYS_PTRACE", "SYS_RESOURCE"))
"""What can be added besides. The others let processes change what no checkpoint holds and what `quiet.py` does not look
for: mounts, addresses, the host name, clocks, immutable files."""
PROCESSES = 8192
"""And threads, at once: what forks for ever is a failure of its own container's and not of the machine."""
NEEDED_FOR_A_USER = ("SETUID", "SETGID", "KILL")


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
    _check_capabilities(spec)


def _check_capabilities(spec: SandboxSpec) -> None:
    for name in (*spec.cap_drop, *spec.cap_add):
        if name not in DEFAULT_CAPABILITIES | MORE_CAPABILITIES and (name != "ALL" or name in spec.cap_add):
            known = ", ".join(sorted(DEFAULT_CAPABILITIES | MORE_CAPABILITIES))
            raise InputError(f"a sandbox's capability {name!r} can be neither added nor dropped; there are {known}")
    missing = [
        name
        for name in NEEDED_FOR_A_USER
        if spec.user and name not in spec.cap_add and not {name, "ALL"}.isdisjoint(spec.cap_drop)
    ]
    if missing:
        raise InputError(f"the sandbox's user {spec.user!r} needs {', '.join(missing)} in process 1; do not drop it")


def mounts(spec: SandboxSpec) -> list[dict[str, Any]]:
    """The binds, as Docker's API wants them."""
    made: list[dict[str, Any]] = []
    for source, target, *mode in (bind.split(":") for bind in spec.binds):
        kind = "bind" if source.startswith("/") else "volume"
        made.append({"Type": kind, "Source": source, "Target": target, "ReadOnly": mode == ["ro"]})
    return made


def host_config(spec: SandboxSpec) -> dict[str, Any]:
    """The limits, the network and the file systems, as docker-py's create_host_config wants them."""
    config: dict[str, Any] = {"network_mode": spec.network, "read_only": spec.read_only, "pids_limit": PROCESSES}
    if spec.memory_bytes is not None:
        config["mem_limit"] = spec.memory_bytes
    if spec.cpus is not None:
        config["nano_cpus"] = int(spec.cpus * 1e9)
    if spec.tmpfs:
        config["tmpfs"] = dict.fromkeys(spec.tmpfs, "exec,mode=1777")
    if spec.cap_drop:
        config["cap_drop"] = list(spec.cap_drop)
    if spec.cap_add:
        config["cap_add"] = list(spec.cap_add)
    return config
