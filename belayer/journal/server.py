"""Asking the server: a few links for questions, one of its own for each that may block, and a deadline for all.

For everything but appends and takeovers, which have a lane of their own. What is asked here may be asked twice (a reply
was lost), so every command given to `ask` must be harmless when repeated. A server that is away, loading or full is
asked again until the deadline.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import hiredis
from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_delay, wait_random_exponential

from belayer.errors import JournalUnavailableError
from belayer.journal.address import Address
from belayer.journal.link import Link, LinkLostError, Packable, Reply, pack
from belayer.journal.replies import ELSEWHERE, Again, Refused, judged_error, refused_command

REPLY_S = 5.0
SHARED_LINKS = 4
"""Links on which all questions travel that do not block, however many tasks ask."""


class Server:
    """The server at an address; links are opened as needed and kept."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._shared: list[Link | None] = [None] * SHARED_LINKS
        self._opening = [asyncio.Lock() for _ in range(SHARED_LINKS)]
        self._turn = 0
        self._idle: list[Link] = []
        self._closed = False

    async def ask(self, *command: Packable, block_s: float = 0.0, accept: tuple[str, ...] = ()) -> Reply:
        """The reply to one command. `block_s`: how long the server may take on purpose.

        Error replies that start with one of `accept` are returned; others are ServerRefusedError, or passing ones
        (loading, out of memory) are waited out. JournalUnavailableError after the deadline.
        """
        return (await self.ask_all([command], block_s=block_s, accept=accept))[0]

    async def ask_all(
        self, commands: list[tuple[Packable, ...]], *, block_s: float = 0.0, accept: tuple[str, ...] = ()
    ) -> list[Reply]:
        """The replies to a pipeline of commands, in order."""
        started = time.monotonic()
        packed = [pack(command) for command in commands]
        with suppress(Again, LinkLostError):
            return await self._ask_once(packed, block_s, accept)
        retrying = AsyncRetrying(
            stop=stop_after_delay(self.timeout_s),
            wait=wait_random_exponential(multiplier=0.01, max=0.5),
            retry=retry_if_exception_type((Again, LinkLostError)),
        )
        try:
            return await retrying(self._ask_once, packed, block_s, accept)
        except RetryError as error:
            cause = str(error.last_attempt.exception())
            raise JournalUnavailableError(self.address.shown, time.monotonic() - started, cause) from None

    def close(self) -> None:
        """Close all links. Questions under way fail."""
        self._closed = True
        for link in (*self._shared, *self._idle):
            if link is not None:
                link.close()

    async def _ask_once(self, packed: list[bytes], block_s: float, accept: tuple[str, ...]) -> list[Reply]:
        if not block_s:
            link = await self._shared_link()
            return self._judged(link, await link.exchange(packed, len(packed), REPLY_S), accept)
        link = self._idle.pop() if self._idle else await self.open_link()
        try:
            replies = await link.exchange(packed, len(packed), REPLY_S + block_s)
        except BaseException:
            link.close()
            raise
        self._idle.append(link)
        return self._judged(link, replies, accept)

    def _judged(self, link: Link, replies: list[Reply], accept: tuple[str, ...]) -> list[Reply]:
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError) and not str(reply).startswith(accept or "\0"):
                if str(reply).startswith(ELSEWHERE):
                    link.close()
                error = judged_error(self.address.shown, reply)
                raise refused_command(self.address.shown, reply) if isinstance(error, Refused) else error
        return replies

    async def _shared_link(self) -> Link:
        self._turn = turn = (self._turn + 1) % SHARED_LINKS
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
            raise JournalUnavailableError(self.address.shown, 0.0, "the store is closed")
        link = await Link.open(self.address, "belayer", REPLY_S)
        if self._closed:
            link.close()
        return link
