"""How the server is found that takes the writes of a key: one that a URL names, Sentinel's primary, a slot's owner.

Invariant: every opened link leads to a server that held itself for the primary when it was opened. Finding it takes
place at every opening, so after a failover or a moved slot whoever opens the next link is led to the new place.
LinkLostError when there is no such server now; ServerRefusedError when no waiting would help.
"""

from __future__ import annotations

from typing import Protocol

from belayer.journal.address import Address, parse_address
from belayer.journal.link import Link


class Route(Protocol):
    """The way to the server of one key."""

    @property
    def shown(self) -> str:
        """The journal's URL without user, password and options."""
        ...

    async def open(self, name: str, timeout_s: float) -> Link:
        """A new link, logged in under the client name."""
        ...

    async def open_asked(self, reply: str, name: str, timeout_s: float) -> Link:
        """A new link to the server that an ASK reply names; each command there needs an ASKING before it."""
        ...

    async def is_current(self, link: Link, timeout_s: float) -> bool:
        """Whether the link still leads to where a new one would, as far as others than its own server can tell."""
        ...

    def redirected(self, reply: str) -> None:
        """A server said that it is not the one (MOVED, READONLY, CLUSTERDOWN); the next link leads elsewhere."""
        ...


class Routes(Protocol):
    """The ways to the servers of all keys of one journal."""

    @property
    def shown(self) -> str: ...

    @property
    def is_cluster(self) -> bool:
        """Whether keys of different hash tags may be on different servers."""
        ...

    def of(self, key: bytes) -> Route:
        """The way to the key, and to all keys with its hash tag."""
        ...


class FixedRoute:
    """Always the server at one address."""

    is_cluster = False

    def __init__(self, address: Address) -> None:
        self._address = address

    @property
    def shown(self) -> str:
        return self._address.shown

    def of(self, key: bytes) -> Route:
        return self

    async def open(self, name: str, timeout_s: float) -> Link:
        return await Link.open(self._address, name, timeout_s)

    async def open_asked(self, reply: str, name: str, timeout_s: float) -> Link:
        return await self.open(name, timeout_s)

    async def is_current(self, link: Link, timeout_s: float) -> bool:
        return True

    def redirected(self, reply: str) -> None:
        pass


def parse_routes(url: str) -> Routes:
    """Read any form of URL; InputError names the forms."""
    from belayer.journal.cluster import ClusterRoutes
    from belayer.journal.sentinel import SentinelRoute

    scheme = url.partition("://")[0]
    match scheme.partition("+"):
        case ("redis" | "rediss", "+", "sentinel"):
            return SentinelRoute(url)
        case ("redis" | "rediss", "+", "cluster"):
            return ClusterRoutes(url)
        case _:
            return FixedRoute(parse_address(url))
