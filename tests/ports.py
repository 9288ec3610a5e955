"""What the tests of one machine must not have twice, whatever checkouts they run in: TCP ports, networks."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LEAST_PORT = 10_000
_claims: list[socket.socket] = []


def claimed(name: str) -> bool:
    """Whether the name is ours now, until this process ends: it is bound in the kernel's abstract namespace."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0belayer-test-{name}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True


def free_port() -> int:
    """A port of the loopback interface that nobody uses and no other test gets.

    Below those that the kernel gives to outgoing connections: one of these could take the port before its server does,
    and a connection to such a port may even be answered by itself.
    """
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(_LEAST_PORT, ephemeral)
        if claimed(f"port-{port}") and _is_unused(port):
            return port


def _is_unused(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
