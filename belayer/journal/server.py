"""Asking a shard's server: a few links for questions, one of its own for each that may block, and a deadline for all.

For everything but appends and takeovers, which have a lane of their own. What is asked here may be asked twice (a reply
was lost), so every command given to `ask` must be harmless when repeated. A server that is away, loading or full is
asked again until the deadline.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress

import hiredis

from belayer.errors import JournalUnavailableError
from belayer.journal.link import Link, LinkLostError, Packable, Reply, pack
from belayer.journal.replies import ASK, ELSEWHERE, Again, Refused, judged_error, refused_command
from belayer.journal.route import Route

REPLY_S = 5.0
SHARED_LINKS = 4
"""Links on which all questions travel that do not block, however many tasks ask."""

ASKING = pack((b"ASKING",))
_MULTI = pack((b"MULTI",))
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
_LATE_S = 0.1
"""A link that hangs is closed at the deadline; after this whoever asks is told so, however many steps he was at."""
_AGAIN_S = 0.001
"""A command is unblocked again after this: the first time may have come before it blocked."""


def is_asked(reply: Reply) -> bool:
    """Whether the reply sends the command elsewhere for once."""
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith(ASK)


class Server:
    """The server at the end of a route; links are opened as needed and kept."""

    def __init__(self, route: Route, timeout_s: float, shared_links: int = SHARED_LINKS) -> None:
        self.route = route
        self.timeout_s = timeout_s
        self._reply_s = min(REPLY_S, timeout_s)
        self._shared: list[Link | None] = [None] * shared_links
        self._opening = [asyncio.Lock() for _ in range(shared_links)]
        self._turn = 0
        self._idle: list[Link] = []
        self._closed = False

    async def ask(
        self,
        *command: Packable,
        block_s: float = 0.0,
        ended: asyncio.Event | None = None,
        accept: tuple[str, ...] = (),
    ) -> Reply:
        """The reply to one command. `block_s`: how long the server may take on purpose, less once `ended` is set.

        Error replies that start with one of `accept` are returned; others are ServerRefusedError, or passing ones
        (loading, out of memory) are waited out. JournalUnavailableError after the deadline.
        """
        return (await self.ask_all([command], block_s=block_s, ended=ended, accept=accept))[0]

    async def ask_all(
        self,
        commands: list[tuple[Packable, ...]],
        *,
        block_s: float = 0.0,
        ended: asyncio.Event | None = None,
        accept: tuple[str, ...] = (),
    ) -> list[Reply]:
        """The replies to a pipeline of commands, in order."""
        started = time.monotonic()
        packed = [pack(command) for command in commands]
        cause, pause_s = "no reply in time", _FIRST_PAUSE_S
        with suppress(TimeoutError):
            async with asyncio.timeout(self.timeout_s + block_s + _LATE_S):
                while True:
                    try:
                        return await self._ask_once(packed, block_s, ended, accept)
                    except (Again, LinkLostError) as error:
                        cause = str(error)
                    await asyncio.sleep(random.uniform(0.0, pause_s))
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise JournalUnavailableError(self.route.shown, time.monotonic() - started, cause)

    def close(self) -> None:
        """Close all links. Questions under way fail."""
        self._closed = True
        for link in (*self._shared, *self._idle):
            if link is not None:
                link.close()

    async def _ask_once(
        self, packed: list[bytes], block_s: float, ended: asyncio.Event | None, accept: tuple[str, ...]
    ) -> list[Reply]:
        if not block_s:
            link = await self._shared_link()
            replies = await link.exchange(packed, len(packed), self._reply_s)
        else:
            link = self._idle.pop() if self._idle else await self.open_link()
            try:
                replies = await self.exchange_until(link, packed, self._reply_s + block_s, ended)
            except BaseException:
                link.close()
                raise
            if not link.is_lost:
                self._idle.append(link)
        if asked := next((str(reply) for reply in replies if is_asked(reply)), None):
            replies = await self._ask_elsewhere(asked, packed, block_s)
        return self._judged(link, replies, accept)

    async def exchange_until(
        self, link: Link, packed: list[bytes], timeout_s: float, ended: asyncio.Event | None
    ) -> list[Reply]:
        """The replies to commands of which one may block; once `ended` is set it is unblocked, so that it ends soon."""
        if ended is None:
            return await link.exchange(packed, len(packed), timeout_s)
        blocked = asyncio.create_task(link.exchange(packed, len(packed), timeout_s))
        ending = asyncio.create_task(ended.wait())
        try:
            await asyncio.wait([blocked, ending], return_when=asyncio.FIRST_COMPLETED)
            while not blocked.done():
                await self.ask("CLIENT", "UNBLOCK", str(link.client_id))
                await asyncio.wait([blocked], timeout=_AGAIN_S)
        finally:
            ending.cancel()
            blocked.cancel()
        return blocked.result()

    async def _ask_elsewhere(self, asked: str, packed: list[bytes], block_s: float) -> list[Reply]:
        """The same commands at the server that a moving key has moved to. Only a MULTI keeps the ASKING before it."""
        link = await self.route.open_asked(asked, "belayer", self._reply_s)
        try:
            commands = [packed[0]] if packed[0] == _MULTI else packed
            asking = [part for command in commands for part in (ASKING, command)] + packed[len(commands) :]
            replies = await link.exchange(asking, len(asking), self._reply_s + block_s)
            return [reply for reply, command in zip(replies, asking, strict=True) if command is not ASKING]
        finally:
            link.close()

    def _judged(self, link: Link, replies: list[Reply], accept: tuple[str, ...]) -> list[Reply]:
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError) and not str(reply).startswith(accept or "\0"):
                if str(reply).startswith(ELSEWHERE):
                    self.route.redirected(str(reply))
                    link.close()
                error = judged_error(self.route.shown, reply)
                raise refused_command(self.route.shown, reply) if isinstance(error, Refused) else error
        return replies

    async def _shared_link(self) -> Link:
        self._turn = turn = (self._turn + 1) % len(self._shared)
        link = self._shared[turn]
        if link is not None and not link.is_lost:
            return link
        async with self._opening[turn]:
            link = self._shared[turn]
            if link is None or link.is_lost:
                link = self._shared[turn] = await self.open_link()
            return link

    async def open_link(self) -> Link:
        """A link for the caller alone, who closes it. LinkLostError when that fails now."""
        if self._closed:
            raise JournalUnavailableError(self.route.shown, 0.0, "the store is closed")
        link = await self.route.open("belayer", self._reply_s)
        if self._closed:
            link.close()
        return link
