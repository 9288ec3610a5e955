"""Sockets that cannot come back: those of a family or protocol that CRIU does not know; those that hang on the
container's own address, which a restored one does not have; connections that nobody has accepted yet, which CRIU does
not dump; ping's, and memberships of multicast groups.

Loopback is the same everywhere and a wildcard is any address, so what is bound to those is fine, in any state. So is
what the kernel alone still holds (connections that wait for their last packets): no process would miss it. Sources:
Linux, networking/proc_net_tcp.rst, whose columns udp and raw share; packet(7). What
is bound and does nothing yet is in no table: a copy of the descriptor tells.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from belayer.sandbox.descriptors import copies
from belayer.sandbox.text import rows_of

TABLES = ("tcp", "udp", "udplite", "raw")
EVERYBODY = ("010000E0", "ff020000000000000000000000000001", "ff010000000000000000000000000001")
"""Groups that every interface is in."""
SOLICITED = "ff0200000000000000000001ff"
"""So begin those that follow from its addresses."""
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
DUMPABLE = frozenset((socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET))
"""Families that CRIU knows."""
MPTCP = 262
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
    for group in _groups(Path(f"/proc/{init}/net")):
        return init, f"a process of it has joined the multicast group {group}, and would not be in it after a restore"
    for pid in processes:
        for held in _sockets(pid):
            if held.family not in DUMPABLE:
                return pid, f"it has a socket of family {held.family!s}, which CRIU cannot dump"
            if held.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if held.proto == MPTCP:
                return pid, "it has an MPTCP socket, which CRIU cannot dump; in Go, GODEBUG=multipathtcp=0 means TCP"
            if held.type == socket.SOCK_DGRAM and held.proto in (socket.IPPROTO_ICMP, socket.IPPROTO_ICMPV6):
                return pid, "it has a ping socket (SOCK_DGRAM of ICMP), which CRIU cannot bring back"
            address, port = held.getsockname()[:2]
            if not _is_everywhere(ipaddress.ip_address(address.partition("%")[0])):
                return pid, f"it has a socket bound to {address} port {port}, {NOT_ELSEWHERE}"
    return None


def _groups(net: Path) -> Iterator[str]:
    """Multicast groups that somebody has joined."""
    for row in _rows(net / "igmp"):
        if len(row[0]) == 8 and row[0] not in EVERYBODY:  # the other rows count the interfaces
            yield str(_address(f"{row[0]}:0"))
    for row in _rows(net / "igmp6", header=0):
        if row[2] not in EVERYBODY and not row[2].startswith(SOLICITED):
            yield str(ipaddress.ip_address(bytes.fromhex(row[2])))


def _sockets(pid: int) -> Iterator[socket.socket]:
    """Copies of the process's sockets, each open until the next."""
    for copy in copies(pid, lambda target: target.startswith("socket:[")):
        held = socket.socket(fileno=copy)
        try:
            yield held
        finally:
            held.detach()


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


def _rows(table: Path, header: int = 1) -> list[list[str]]:
    """Empty where the kernel has no such sockets."""
    with suppress(FileNotFoundError):
        return [row.decode().split() for row in rows_of(table)[header:]]
    return []


def _is_anywhere(field: str) -> bool:
    return _is_everywhere(_address(field))


def _is_everywhere(address: Address) -> bool:
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def _named(field: str) -> str:
    return f"{_address(field)} port {int(field.split(':')[1], 16)}"


def _address(field: str) -> Address:
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
