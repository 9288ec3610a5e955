"""Real faults for the journal's tests: a proxy that loses replies or holds requests, and raw commands to a server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from belayer import ids
from belayer.errors import JournalUnavailableError
from belayer.ids import StreamId
from belayer.journal.codec import Recorded
from belayer.journal.connect import open_store
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.events import GenerationStarted
from belayer.journal.redis_store import RedisStore
from belayer.journal.route import parse_routes
from belayer.journal.server import Server
from belayer.journal.store import JournalStore
from belayer.journal.writer import StreamWriter, read_events, take_over
from tests.waiting import DEADLINE_S, until

T = ids.trajectory("t")


async def command(url: str, *parts: str, refusable: tuple[str, ...] = ()) -> Any:
    """One command to the server, as an operator would type it. Errors that start so are no matter."""
    server = Server(parse_routes(url).of(b""), DEADLINE_S)
    try:
        return await server.ask(*parts, accept=refusable)
    finally:
        server.close()


async def raw(url: str, request: bytes) -> bytes:
    """The first line of the server's answer, whatever it is."""
    reader, writer = await asyncio.open_unix_connection(url.removeprefix("unix://"))
    try:
        writer.write(request)
        return await reader.readline()
    finally:
        writer.close()


async def opened(url: str, **options: Any) -> RedisStore:
    """The journal at the URL, with a deadline that matters only when a test fails."""
    return await open_store(url, **{"timeout_s": DEADLINE_S, **options})


@contextlib.contextmanager
def hurried(store: RedisStore, timeout_s: float) -> Iterator[None]:
    """Meanwhile the store's calls end after so long. Opening it, and whatever must succeed, is not meant to."""
    limited = [(lane, "_timeout_s") for lane in store._lanes] + [(server, "timeout_s") for server in store._servers]
    before = [getattr(*one) for one in limited]
    for one in limited:
        setattr(*one, timeout_s)
    try:
        yield
    finally:
        for one, value in zip(limited, before, strict=True):
            setattr(*one, value)


async def said_in_the_end(call: Callable[[], Awaitable[object]], cause: str) -> None:
    """The call fails for want of the journal until it says this cause: on a busy machine a late reply is one too."""

    async def said() -> bool:
        with pytest.raises(JournalUnavailableError) as caught:
            await call()
        return re.search(cause, str(caught.value)) is not None

    await until(said, what=f"an error that says {cause}")


async def written(store: JournalStore, stream: StreamId = T, count: int = 3) -> StreamWriter:
    """A new writer of the stream that has appended `count` events."""
    writer, _ = await take_over(store, stream, "a")
    for number in range(count):
        await writer.append(generation(number))
    return writer


def generation(number: int) -> GenerationStarted:
    return GenerationStarted(number, "w", "w-1")


async def stored(store: JournalStore, stream: StreamId = T) -> list[Recorded]:
    """Everything in the stream, its chain checked."""
    return [recorded async for recorded in read_events(store, stream)]


async def lose_the_last_entry(server: EmbeddedServer, entries: int = 1) -> None:
    """What a crash of the machine does in mode everysec: the newest commands were never written to disk."""
    await server.stop()
    (aof,) = (server.folder / "appendonlydir").glob("*.incr.aof")
    data = aof.read_bytes()
    for _ in range(entries):
        start = data.rindex(b"*", 0, data.rindex(b"XADD"))
        multi = data.rfind(b"*1\r\n$5\r\nMULTI", 0, start)
        if data.find(b"EXEC", multi) > start > multi >= 0:
            start = multi
        data = data[:start]
    aof.write_bytes(data)
    await server.start()


@contextlib.contextmanager
def paused(pid: int) -> Iterator[None]:
    """The process is stopped meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class Proxy:
    """Stands between a store and a server, on a Unix socket of its own.

    `lose_reply(word)`: the next request with the word in it reaches the server and is executed; then the connection
    breaks before the reply. `hold(word)`: such a request waits here until `release`.
    `slow_s`: every reply takes so much longer.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self._path = str(folder / "proxy.sock")
        self._server_path = url.removeprefix("unix://")
        self._lose: bytes | None = None
        self._hold: bytes | None = None
        self._released = asyncio.Event()
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.lost = 0
        self.slow_s = 0.0
        self._ended = asyncio.Event()
        self.held = asyncio.Event()

    @property
    def url(self) -> str:
        return f"unix://{self._path}"

    def lose_reply(self, word: bytes) -> None:
        self._lose = word

    def hold(self, word: bytes) -> None:
        self._hold = word
        self.held.clear()
        self._released.clear()

    def release(self) -> None:
        self._hold = None
        self._released.set()

    def cut(self) -> None:
        """Break all connections now."""
        for connection in self._connections:
            connection.transport.abort()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        server = await asyncio.start_unix_server(self._accept, self._path)
        try:
            yield self
        finally:
            server.close()
            self._released.set()
            self._ended.set()
            self.cut()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, client_reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        try:
            server_reader, server = await asyncio.open_unix_connection(self._server_path)
        except OSError:
            client.transport.abort()
            return
        ends = {client, server}
        self._connections |= ends
        replies = asyncio.create_task(self._forward(server_reader, client))
        try:
            while data := await client_reader.read(1 << 20):
                if self._hold is not None and self._hold in data:
                    self.held.set()
                    await self._released.wait()
                if self._lose is not None and self._lose in data:
                    self._lose = None
                    replies.cancel()
                    await asyncio.wait([replies])
                    server.write(data)
                    await server_reader.read(1)
                    self.lost += 1
                    break
                server.write(data)
        except OSError:
            pass
        finally:
            replies.cancel()
            for end in ends:
                end.transport.abort()
            self._connections -= ends

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 20):
                if self.slow_s:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._ended.wait(), self.slow_s)
                writer.write(data)
        writer.transport.abort()


@contextlib.asynccontextmanager
async def two_stores(
    folder: Path, server: EmbeddedServer, **options: Any
) -> AsyncIterator[tuple[Proxy, RedisStore, RedisStore]]:
    """A proxy before the server, a store that goes through it, and one that does not."""
    async with Proxy(folder, server.url).running() as proxy:
        store, other = await opened(proxy.url, **options), await opened(server.url, **options)
        yield proxy, store, other
        await store.close()
        await other.close()
