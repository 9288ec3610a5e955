"""The memory server's orders to this rank: kept until all ranks follow them in one turn (belayer/gpu/plugin/ranks.py).

Only `Follow` is carried out on arrival: it maps memory and changes nothing that is scheduled. A wait for an order has
a deadline; when that passes the process ends, because the other ranks are past the point of no return.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable
from typing import TypeVar

from belayer.gpu import wire
from belayer.gpu.plugin.link import Link

_log = logging.getLogger("belayer")
_TIMEOUT_S = 30.0
_Order = TypeVar("_Order", bound=wire.Order)


class Orders:
    """`follow` is called with the descriptors of a Follow."""

    def __init__(self, link: Link, follow: Callable[[list[int]], None]) -> None:
        self._link = link
        self._follow = follow
        self._arrived: list[tuple[wire.Order, list[int]]] = []

    def look(self) -> None:
        """Take in what has arrived; does not wait."""
        while (received := self._link.client.order()) is not None:
            if isinstance(received[0], wire.Follow):
                self._follow(received[1])
            else:
                self._arrived.append(received)

    def has(self, kind: type[wire.Order]) -> bool:
        return any(isinstance(order, kind) for order, _ in self._arrived)

    def take(self, kind: type[_Order]) -> tuple[_Order, list[int]]:
        """The next order of that kind and its descriptors; waits for it."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            self.look()
            for number, (order, fds) in enumerate(self._arrived):
                if isinstance(order, kind):
                    del self._arrived[number]
                    return order, fds
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                _log.error("belayer: the memory server did not say %s within %.0f s", kind.__name__, _TIMEOUT_S)
                os._exit(3)
            select.select([self._link.client.fileno()], [], [], left_s)
