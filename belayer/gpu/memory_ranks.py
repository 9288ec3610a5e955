"""The memory servers of one engine, one for each of its tensor parallel ranks, spoken to as one.

Rank r's server owns the r-th device, and its socket has `{rank}` replaced by r in its path. What is asked of an engine
is asked of all its servers, and has been done once all have said so. An engine is dying as soon as one of its ranks is,
and dead once all of them are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise
from pathlib import Path

from belayer.errors import InputError
from belayer.gpu import wire
from belayer.gpu.memory_client import MemoryClient
from belayer.gpu.memory_process import ask_status

RANK = "{rank}"
_SIZE_OPTIONS = ("--tensor-parallel-size", "--tp-size", "--tp")


def tensor_parallel_size(arguments: Sequence[str]) -> int:
    """What SGLang's arguments say."""
    size = "1"
    for word, following in pairwise([*arguments, ""]):
        name, given, value = word.partition("=")
        if name in _SIZE_OPTIONS:
            size = value if given else following
    if not size.isdecimal() or int(size) < 1:
        raise InputError(f"{size!r} is no tensor parallel size")
    return int(size)


class MemoryRanks:
    """The servers at `pattern`, of `size` ranks."""

    def __init__(self, pattern: Path, size: int) -> None:
        if size > 1 and RANK not in str(pattern):
            raise InputError(f"the memory socket {pattern} is that of one server; {size} ranks need {RANK} in its path")
        self._sockets = [Path(str(pattern).replace(RANK, str(rank))) for rank in range(size)]

    async def ask(self, request: wire.Request, timeout_s: float) -> wire.Facts:
        """All servers' answer; of each number the greatest. ArenaError of the first that refuses.

        All have been asked before this waits for the first time. What a thread has to do may have to wait for Python's
        lock, 5 ms each time, while streams that resume keep this one busy: so threads only take the answers.
        """
        with contextlib.ExitStack() as open_files:
            clients = [open_files.enter_context(MemoryClient.open(path)) for path in self._sockets]
            for client in clients:
                client.tell(wire.Register("host", "control"))
                client.tell(request)
            open_files.pop_all()
        answers = await asyncio.gather(*(asyncio.to_thread(_answer, client, timeout_s) for client in clients))
        names = {name for answer in answers for name in answer.facts}
        return wire.Facts({name: max(answer.facts.get(name, 0.0) for answer in answers) for name in names})

    async def status(self) -> list[wire.Status]:
        """Each server's state, in order of rank."""
        return await asyncio.gather(*(asyncio.to_thread(ask_status, path) for path in self._sockets))

    async def events(self, watching: asyncio.Event | None = None) -> AsyncGenerator[wire.EngineEvent]:
        """What happens to the engines from when `watching` is set. Close the iterator to stop."""
        said: dict[tuple[str, str], int] = {}
        async with contextlib.aclosing(self._told(wire.Watch(), watching)) as told:
            async for _, event in told:
                if isinstance(event, wire.EngineEvent):
                    of_all = (event.kind, event.incarnation)
                    said[of_all] = said.get(of_all, 0) + 1
                    if said[of_all] == (len(self._sockets) if event.kind == "dead" else 1):
                        yield event

    async def weight_versions(self) -> AsyncGenerator[int]:
        """The version of the weights, once all ranks have it whole: the present one, then each that is committed."""
        versions: dict[int, int] = {}
        async with contextlib.aclosing(self._told(wire.WatchWeights())) as told:
            async for rank, event in told:
                if isinstance(event, wire.WeightsEvent):
                    versions[rank] = event.version
                    if len(versions) == len(self._sockets) and len(set(versions.values())) == 1:
                        yield event.version

    async def _told(
        self, watch: wire.Watch | wire.WatchWeights, watching: asyncio.Event | None = None
    ) -> AsyncGenerator[tuple[int, wire.EngineEvent | wire.WeightsEvent]]:
        """What each rank's server says, unasked. MemoryServerGoneError once one of them is gone."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        with contextlib.ExitStack() as open_files:
            clients: list[MemoryClient] = []
            for path in self._sockets:
                client, _ = await asyncio.to_thread(MemoryClient.connect, path, "host", "control")
                clients.append(open_files.enter_context(client))
                await asyncio.to_thread(client.ask, watch, wire.Facts)
                loop.add_reader(client.fileno(), arrived.set)
                open_files.callback(loop.remove_reader, client.fileno())
            if watching is not None:
                watching.set()
            while True:
                arrived.clear()
                for rank, client in enumerate(clients):
                    while (event := client.event()) is not None:
                        yield rank, event
                await arrived.wait()


def _answer(client: MemoryClient, timeout_s: float) -> wire.Facts:
    with client:
        client.answer(wire.Registered, timeout_s)
        return client.answer(wire.Facts, timeout_s)[0]
