"""One connection to the server that carries pipelines: many commands out, as many replies back, in order.

Invariant: a link that failed once (closed, late, a reply too many) is closed for good and says so at every further use;
which of the commands that were under way took effect is then unknown. Replies come as hiredis makes them: bytes, int,
None, list, or hiredis.ReplyError as a value, for the caller to judge.

We use hiredis directly, not redis-py's connection, because a reply then costs a fifth of the time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from belayer.journal.address import Address
from belayer.journal.replies import is_transient, refused_command

Packable = str | bytes
Reply = Any

pack = cast("Callable[[tuple[Packable, ...]], bytes]", hiredis.pack_command)  # pyright: ignore[reportUnknownMemberType]
"""A command as the bytes to send."""

LONGEST_PAUSE_S = 0.5
"""Between two attempts at what may soon be well."""


class LinkLostError(Exception):
    """The link is gone. `cause` is for a person to read."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class NotReadyError(LinkLostError):
    """The server is there and will soon be what it is to be: it loads its data, or a failover makes it the primary.

    A server that loads does not even say truly whether it has an append-only file.
    """


def once_ready(timeout_s: float) -> AsyncRetrying:
    """Waits out NotReadyError, for so long."""
    return AsyncRetrying(
        retry=retry_if_exception_type(NotReadyError),
        stop=stop_after_delay(timeout_s),
        wait=wait_random_exponential(multiplier=0.01, max=LONGEST_PAUSE_S),
        reraise=True,
    )


class _Wire(asyncio.Protocol):
    """Gives the replies, in order, to those who wait for them: so many to the first, so many to the next.

    One timer watches over all of them: `asyncio.timeout` for each costs more than what it watches over.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._reader = hiredis.Reader(notEnoughData=Ellipsis)
        self._replies: list[Reply] = []
        self._waiting: deque[tuple[int, asyncio.Future[list[Reply]], float, float]] = deque()
        """How many replies, for whom, until when (the loop's time), which is after how many seconds."""
        self._watch: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self.lost: str | None = None

    def send(self, data: bytes, replies: int, timeout_s: float) -> asyncio.Future[list[Reply]]:
        """Send commands; their replies. Without them in time the wire is lost."""
        assert self._transport is not None
        complete: asyncio.Future[list[Reply]] = self._loop.create_future()
        deadline = self._loop.time() + timeout_s
        self._waiting.append((replies, complete, deadline, timeout_s))
        self._watch_until(deadline)
        self._transport.write(data)
        return complete

    def _watch_until(self, deadline: float) -> None:
        if self._watch is None or deadline < self._watch.when():
            if self._watch is not None:
                self._watch.cancel()
            self._watch = self._loop.call_at(deadline, self._look_at_deadlines)

    def _look_at_deadlines(self) -> None:
        self._watch = None
        now = self._loop.time()
        waiting = [(deadline, timeout_s) for _, complete, deadline, timeout_s in self._waiting if not complete.done()]
        for deadline, timeout_s in waiting:
            if deadline <= now:
                self.lose(f"no reply within {timeout_s:.1f} s")
                return
        if waiting:
            self._watch_until(min(deadline for deadline, _ in waiting))

    def lose(self, cause: str) -> None:
        """Close for good."""
        self.lost = self.lost or cause
        if self._transport is not None:
            self._transport.abort()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        for _, complete, _, _ in self._waiting:
            if not complete.done():
                complete.set_exception(LinkLostError(self.lost))
        self._waiting.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self.lose(f"the connection broke: {exc}" if exc else "the server closed the connection")

    def data_received(self, data: bytes) -> None:
        reader, replies, waiting = self._reader, self._replies, self._waiting
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not Ellipsis:
                replies.append(reply)
                if not waiting:
                    self.lose("the server sent more replies than there were commands")
                    return
                if len(replies) == waiting[0][0]:
                    complete = waiting.popleft()[1]
                    if not complete.done():
                        complete.set_result(replies)
                    replies = self._replies = []
        except hiredis.ProtocolError as error:
            self.lose(f"the server sent what is not its protocol: {error}")


class Link:
    """An open connection. Several tasks may use it; the server works off their commands in the order of sending."""

    def __init__(self, wire: _Wire, address: str) -> None:
        self._wire = wire
        self.address = address
        """The server's address as shown."""
        self.client_id = 0
        """The server's name for this link."""

    @classmethod
    async def open(cls, address: Address, name: str, timeout_s: float) -> Link:
        """Connect and log in. LinkLostError when that fails now; ServerRefusedError when the login is refused."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                if address.socket_path is not None:
                    _, wire = await loop.create_unix_connection(lambda: _Wire(loop), address.socket_path)
                else:
                    _, wire = await loop.create_connection(
                        lambda: _Wire(loop), address.host, address.port, ssl=address.tls and address.tls.context()
                    )
        except TimeoutError:
            raise LinkLostError(f"no connection within {timeout_s:.1f} s") from None
        except OSError as error:
            raise LinkLostError(error.strerror or str(error)) from None
        link = cls(wire, address.shown)
        try:
            await link._log_in(address, name, timeout_s)
        except BaseException:
            link.close()
            raise
        return link

    async def _log_in(self, address: Address, name: str, timeout_s: float) -> None:
        commands: list[tuple[str, ...]] = []
        if address.password is not None:
            user = () if address.username is None else (address.username,)
            commands.append(("AUTH", *user, address.password))
        if address.db:
            commands.append(("SELECT", str(address.db)))
        commands.append(("CLIENT", "SETNAME", name))
        commands.append(("CLIENT", "ID"))
        replies = await self.exchange([pack(command) for command in commands], len(commands), timeout_s)
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                text = str(reply).partition(", with args beginning with")[0]  # an unknown command's, perhaps cut short
                said = hiredis.ReplyError(text.replace(address.password or "\0", "***"))
                if is_transient(said):
                    raise LinkLostError(str(said))
                raise refused_command(address.shown, said)
        self.client_id = int(replies[-1])

    @property
    def is_lost(self) -> bool:
        return self._wire.lost is not None

    async def exchange(self, packed: Sequence[bytes], replies: int, timeout_s: float) -> list[Reply]:
        """Send the packed commands in one go and return their replies. LinkLostError: what took effect is unknown.

        When the caller is cancelled the replies are dropped as they come, and the link stays in order.
        """
        if self._wire.lost is not None:
            raise LinkLostError(self._wire.lost)
        if not replies:
            return []
        return await self._wire.send(b"".join(packed), replies, timeout_s)

    def close(self) -> None:
        self._wire.lose("closed")
