"""Waiting for streams to grow: any number of waits of one store, one blocked XREAD.

Invariant: every wait is part of the XREAD that is under way, or of the next one, which is due at once: a new wait ends
the blocked XREAD (CLIENT UNBLOCK), so it never waits for another's time-out. A wait may end early and for nothing;
whoever waits looks again. While a cluster moves the streams elsewhere it does so every _PAUSE_S.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from belayer.errors import JournalError, JournalUnavailableError
from belayer.journal.link import Link, LinkLostError, Reply, pack
from belayer.journal.server import REPLY_S, Server

_BLOCK_S = 2.0
_PAUSE_S = 0.05


class Waiting:
    """The waits of one store for the streams of one shard."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._waits: defaultdict[bytes, dict[asyncio.Future[None], tuple[int, int]]] = defaultdict(dict)
        self._new = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def wait(self, key: bytes, after: tuple[int, int], timeout_s: float) -> None:
        """Return when the stream has an entry above the id `after`, or the time is over, or for nothing."""
        grown: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits[key][grown] = after
        self._new.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="belayer-waits")
        try:
            await asyncio.wait([grown], timeout=timeout_s)
        finally:
            waits = self._waits[key]
            waits.pop(grown, None)
            if not waits:
                del self._waits[key]

    async def close(self) -> None:
        """End all waits."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for key in list(self._waits):
            self._end(key)

    async def _run(self) -> None:
        """Block for whatever is waited for, until nothing is."""
        link: Link | None = None
        try:
            while self._waits:
                try:
                    if link is None or link.is_lost:
                        link = await self._server.open_link()
                    await self._block(link)
                except (LinkLostError, JournalError):  # whoever waits asks again, and is told then
                    await asyncio.sleep(_PAUSE_S)
                    for key in list(self._waits):
                        self._end(key)
        finally:
            if link is not None:
                link.close()

    async def _block(self, link: Link) -> None:
        """One XREAD for all waits; ended by an entry, by a new wait, or by time."""
        self._new.clear()
        starts = {key: min(waits.values()) for key, waits in self._waits.items()}
        ids = [b"%d-%d" % start for start in starts.values()]
        read = pack(("XREAD", "COUNT", "1", "BLOCK", str(int(_BLOCK_S * 1000)), "STREAMS", *starts, *ids))
        try:
            (reply,) = await self._server.exchange_until(link, [read], _BLOCK_S + REPLY_S, self._new)
        except JournalUnavailableError as error:
            link.close()
            raise LinkLostError(error.cause) from None
        self._wake(link, reply)

    def _wake(self, link: Link, reply: Reply) -> None:
        if isinstance(reply, list):
            for grown in reply:  # pyright: ignore[reportUnknownVariableType]
                self._end(grown[0])  # pyright: ignore[reportUnknownArgumentType]
        elif reply is not None:
            self._server.route.redirected(str(reply))
            link.close()
            raise LinkLostError(str(reply))

    def _end(self, key: bytes) -> None:
        for grown in self._waits.get(key, ()):
            if not grown.done():
                grown.set_result(None)
