"""Asking the server: a pool of links, and a deadline until which a server that is away is asked again.

For everything but appends and takeovers, which have a lane of their own. What is asked here may be asked twice (a reply
was lost), so every command given to `ask` must be harmless when repeated.
"""

from __future__ import annotations

import time
from contextlib import suppress

import hiredis
from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_delay, wait_random_exponential

from belayer.errors import JournalUnavailableError
from belayer.journal.address import Address
from belayer.journal.link import Link, LinkLostError, Packable, Reply, pack
from belayer.journal.replies import ELSEWHERE, Again, Refused, judged_error, refused_command

REPLY_S = 5.0


class Server:
    """The server at an address; links are opened as needed and kept."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
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
            return await self._ask_once(packed, REPLY_S + block_s, accept)
        retrying = AsyncRetrying(
            stop=stop_after_delay(self.timeout_s),
            wait=wait_random_exponential(multiplier=0.01, max=0.5),
            retry=retry_if_exception_type((Again, LinkLostError)),
        )
        try:
            return await retrying(self._ask_once, packed, REPLY_S + block_s, accept)
        except RetryError as error:
            cause = str(error.last_attempt.exception())
            raise JournalUnavailableError(self.address.shown, time.monotonic() - started, cause) from None

    def close(self) -> None:
        """Close the links that are not in use; those that are close when they come back."""
        self._closed = True
        for link in self._idle:
            link.close()
        self._idle.clear()

    async def _ask_once(self, packed: list[bytes], timeout_s: float, accept: tuple[str, ...]) -> list[Reply]:
        link = await self._borrow()
        try:
            replies = await link.exchange(packed, len(packed), timeout_s)
            for reply in replies:
                if isinstance(reply, hiredis.ReplyError) and not str(reply).startswith(accept or "\0"):
                    raise self._judged(link, reply)
            return replies
        finally:
            self._give_back(link)

    def _judged(self, link: Link, reply: hiredis.ReplyError) -> Exception:
        if str(reply).startswith(ELSEWHERE):
            link.close()
        error = judged_error(self.address.shown, reply)
        return refused_command(self.address.shown, reply) if isinstance(error, Refused) else error

    async def _borrow(self) -> Link:
        while self._idle:
            link = self._idle.pop()
            if not link.is_lost:
                return link
        if self._closed:
            raise JournalUnavailableError(self.address.shown, 0.0, "the store is closed")
        return await Link.open(self.address, "belayer", REPLY_S)

    def _give_back(self, link: Link) -> None:
        if self._closed:
            link.close()
        elif not link.is_lost:
            self._idle.append(link)
