"""The owner of a key's slot in a cluster: `redis+cluster://host:port,host:port`.

Any node may be asked who owns a slot; those of the URL are only where we begin, later all that a node has named are
asked. At every opening of a link the first one that answers is believed, unless the server itself redirected us
(MOVED), which is newer. A stale answer leads to a server that redirects, and so to the right one; or to one that is
dead, or cut off from the others (CLUSTERDOWN), and then the next node is asked.
"""

from __future__ import annotations

import re

import hiredis
from redis.crc import key_slot  # CRC16 of the hash tag modulo 16384 (Redis Cluster specification, 'Key distribution')

from belayer.errors import InputError, ServerRefusedError
from belayer.journal.address import FORMS, Address, parse_places
from belayer.journal.link import Link, LinkLostError, Reply, pack
from belayer.journal.replies import CLUSTER_DOWN, is_transient
from belayer.journal.route import Route

_PORT = 6379
_ANSWER_S = 1.0
_REDIRECT = re.compile(r"(?:MOVED|ASK) (\d+) (.*):(\d+)\Z")

Place = tuple[str, int]


class ClusterRoutes:
    """The nodes of one cluster."""

    is_cluster = True

    def __init__(self, url: str) -> None:
        places = parse_places(url, _PORT)
        if places.path not in ("", "0"):
            raise InputError(f"{places.shown!r}: a cluster has only database 0; expected {FORMS}")
        self._shown = places.shown
        self._login = places.addresses[0]
        self._named: list[Place] = [(address.host, address.port) for address in places.addresses]
        self._nodes: list[Place] = []
        """All that the last answer named; the node that gave it first."""

    @property
    def shown(self) -> str:
        return self._shown

    def of(self, key: bytes) -> Route:
        return _SlotRoute(self, key_slot(key))

    async def owner(self, slot: int, timeout_s: float) -> tuple[Address, Place]:
        """The slot's primary, as the first node that answers has it, and that node."""
        problems: list[str] = []
        for place in self._all():
            address = self.address(place)
            try:
                answer = await self._slots(address, min(timeout_s, _ANSWER_S))
            except LinkLostError as error:
                problems.append(f"{address.shown}: {error.cause}")
                continue
            self._nodes = list(dict.fromkeys([place, *(owner for _, _, owner in answer)]))
            for first, last, owner in answer:
                if first <= slot <= last:
                    return self.address(owner), place
            problems.append(f"{address.shown} says that slot {slot} has no owner")
        raise LinkLostError("; ".join(problems))

    def doubt(self, place: Place) -> None:
        """What this node said leads nowhere: ask the others first from here on."""
        self._nodes = [*(node for node in self._all() if node != place), place]

    @property
    def known(self) -> int:
        """How many nodes there are to ask."""
        return len(self._all())

    def address(self, place: Place) -> Address:
        return self._login.at(*place)

    def _all(self) -> list[Place]:
        return list(dict.fromkeys([*self._nodes, *self._named]))

    async def _slots(self, address: Address, timeout_s: float) -> list[tuple[int, int, Place]]:
        """First slot, last slot and primary of each range."""
        link = await Link.open(address, "belayer", timeout_s)
        try:
            (reply,) = await link.exchange([pack(("CLUSTER", "SLOTS"))], 1, timeout_s)
        finally:
            link.close()
        if isinstance(reply, hiredis.ReplyError):
            if is_transient(reply):
                raise LinkLostError(str(reply))
            raise ServerRefusedError(
                address.shown, "it is not a node of a cluster", str(reply), "name it with redis://, or name the nodes"
            )
        return [(int(part[0]), int(part[1]), _place(address, part[2])) for part in reply]


class _SlotRoute:
    """The way to one slot's owner."""

    def __init__(self, routes: ClusterRoutes, slot: int) -> None:
        self._routes = routes
        self._slot = slot
        self._moved_to: Address | None = None
        self._last: Address | None = None
        self._told_by: Place | None = None

    @property
    def shown(self) -> str:
        return self._routes.shown

    async def open(self, name: str, timeout_s: float) -> Link:
        moved_to, self._moved_to = self._moved_to, None
        problems: dict[str, str] = {}
        for _ in range(self._routes.known):
            address = moved_to
            if address is None:
                address, self._told_by = await self._routes.owner(self._slot, timeout_s)
            self._last = address
            if address.shown not in problems:
                try:
                    return await _opened(address, name, timeout_s)
                except LinkLostError as error:
                    problems[address.shown] = error.cause
            moved_to = None
            self._doubt()
        raise LinkLostError("; ".join(problems.values()))

    async def open_asked(self, reply: str, name: str, timeout_s: float) -> Link:
        if (address := self._redirected_to(reply)) is None:
            raise LinkLostError(f"not a redirection: {reply}")
        return await _opened(address, name, timeout_s)

    async def is_current(self, link: Link, timeout_s: float) -> bool:
        return True

    def redirected(self, reply: str) -> None:
        if reply.startswith(CLUSTER_DOWN):
            self._doubt()
        self._moved_to = self._redirected_to(reply) or self._moved_to

    def _doubt(self) -> None:
        if self._told_by is not None:
            self._routes.doubt(self._told_by)

    def _redirected_to(self, reply: str) -> Address | None:
        """The place in a MOVED or ASK reply; without a host it is the host of the server that said so."""
        if (found := _REDIRECT.match(reply)) is None:
            return None
        host = found[2].strip("[]") or (self._last.host if self._last else "")
        return self._routes.address((host, int(found[3])))


async def _opened(address: Address, name: str, timeout_s: float) -> Link:
    try:
        return await Link.open(address, name, timeout_s)
    except LinkLostError as error:
        raise LinkLostError(f"{address.shown}: {error.cause}") from None


def _place(asked: Address, node: Reply) -> Place:
    """Host and port of a node; one that does not know its own address has the one that we asked at."""
    host = bytes(node[0] or b"").decode()
    return (host if host not in ("", "?") else asked.host), int(node[1])
