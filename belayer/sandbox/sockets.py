"""Sockets that cannot come back: those that hang on the container's own address, which a restored one does not have,
and connections that nobody has accepted yet, which CRIU does not dump.

Loopback is the same everywhere and a wildcard is any address, so what is bound to those is fine, in any state. So is
what the kernel alone still holds (connections that wait for their last packets): no process would miss it. Sources:
Linux, networking/proc_net_tcp.rst, whose columns udp, raw and icmp share; packet(7).
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from belayer.sandbox.text import rows_of

TABLES = ("tcp", "udp", "udplite", "raw", "icmp")
LOOPBACK_INDEX = 1
LISTENING = "0A"
ACCEPTABLE = ("01", "08")
"""States in which a connection that no process holds is one that a listening process can still take: established, and
closed by its far end since."""
NOT_ELSEWHERE = "which another container lacks"


def bound_here(init: int, processes: Iterable[int]) -> tuple[int, str] | None:
    """A process (host pid) with such a socket, and which. Process 1's when it is on its way between two processes."""
    for inode, what in _bound_here(Path(f"/proc/{init}/net")):
        return _holder(f"socket:[{inode}]", processes) or init, what
    return None


def _bound_here(net: Path) -> Iterator[tuple[str, str]]:
    """Inodes, and what there is to say of them."""
    for kind in TABLES:
        for table in (kind, f"{kind}6"):
            rows = _rows(net / table)
            listening = {row[1].split(":")[1]: row[9] for row in rows if row[3] == LISTENING}
            for row in rows:
                here, there, state, inode = row[1], row[2], row[3], row[9]
                if inode == "0":
                    if kind == "tcp" and state in ACCEPTABLE:
                        inode = listening.get(here.split(":")[1], inode)
                        yield inode, f"it has not accepted a TCP connection from {_named(there)} yet"
                elif _is_anywhere(here) and _is_anywhere(there):
                    continue
                elif _address(there).is_unspecified:
                    yield inode, f"it has a {kind.upper()} socket bound to {_named(here)}, {NOT_ELSEWHERE}"
                else:
                    with_whom = f"{_named(there)}, outside the container, from {_named(here)}"
                    yield inode, f"it has a {kind.upper()} connection with {with_whom}; it would not come back"
    for row in _rows(net / "packet"):
        if int(row[4]) not in (0, LOOPBACK_INDEX):
            yield row[8], f"it has a packet socket on network interface {row[4]}, {NOT_ELSEWHERE}"


def _rows(table: Path) -> list[list[str]]:
    """Empty where the kernel has no such sockets."""
    with suppress(FileNotFoundError):
        return [row.decode().split() for row in rows_of(table)[1:]]
    return []


def _is_anywhere(field: str) -> bool:
    address = _address(field)
    return address.is_loopback or address.is_unspecified


def _named(field: str) -> str:
    return f"{_address(field)} port {int(field.split(':')[1], 16)}"


def _address(field: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Of "ADDRESS:PORT" in hexadecimal, the address in words of the processor's byte order."""
    words = bytes.fromhex(field.split(":")[0])
    network = b"".join(words[at : at + 4][:: -1 if sys.byteorder == "little" else 1] for at in range(0, len(words), 4))
    address = ipaddress.ip_address(network)
    return getattr(address, "ipv4_mapped", None) or address


def _holder(target: str, processes: Iterable[int]) -> int:
    """The first process that has it open; 0 when none has."""
    for pid in processes:
        with suppress(FileNotFoundError, ProcessLookupError):
            if any(str(fd.readlink()) == target for fd in Path(f"/proc/{pid}/fd").iterdir()):
                return pid
    return 0
