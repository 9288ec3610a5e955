"""A gateway before real recorded engines, with a journal in memory, and a caller who reads its streams."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from belayer import ids
from belayer.actors.reports import report_engine_failure
from belayer.actors.worker_recovery import WorkerRecovery, look, process_of
from belayer.errors import FencedError, WrongSequenceError
from belayer.gpu.gateway.server import Serving, serving
from belayer.gpu.gateway.settings import Settings
from belayer.gpu.gateway.text import Tokenizer
from belayer.gpu.recorded_host import RecordedEngineHost
from belayer.gpu.recorded_prefix import ASSISTANT, END, TOOL, USER, TokenRecording, logprob
from belayer.journal.codec import Entry
from belayer.journal.events import AnyEvent
from belayer.journal.export import read_entries
from belayer.journal.memory_store import MemoryStore
from belayer.journal.store import JournalStore
from belayer.journal.writer import Reader, events_of
from belayer.processes import host_name
from replay.audit import audit
from tests.waiting import DEADLINE_S, until

PROMPT = [USER, 1, 2, END, ASSISTANT]
TURN = [*range(272, 572), END]
SECOND_PROMPT = [*PROMPT, *TURN, TOOL, 9, END, ASSISTANT]
SECOND_TURN = [3, 4, END]
RECORDING = TokenRecording("long", PROMPT, [TURN, SECOND_TURN])
LOGPROBS = [logprob("long", 0, at, token) for at, token in enumerate(TURN)]


@dataclass
class Site:
    """Workers with real engine processes, in a journal of their own."""

    store: JournalStore
    host: RecordedEngineHost
    recovery: WorkerRecovery
    held: Path
    reports: list[tuple[str, str, str]] = field(default_factory=list)
    recoveries: list[asyncio.Task[None]] = field(default_factory=list)

    def hold(self, at: int) -> None:
        """Until `release` no engine says more than the first `at` tokens of a turn: so long it is in its middle."""
        (new := self.held.with_suffix(".new")).write_text(str(at))
        new.rename(self.held)

    def release(self) -> None:
        self.held.unlink()

    async def report(self, worker: str, incarnation: str, kind: Literal["died", "unreachable"], evidence: str) -> None:
        """As `belayer gateway` does it; then recover, as the actors do."""
        self.reports.append((worker, incarnation, kind))
        if await report_engine_failure(self.store, worker, incarnation, kind, evidence, "gateway"):
            self.recoveries.append(asyncio.create_task(self._recover(worker)))

    async def _recover(self, worker: str) -> None:
        """As the actors' loop does it: whoever was overtaken looks again."""
        while True:
            try:
                return await self.recovery.recover(worker)
            except (FencedError, WrongSequenceError):
                continue

    async def worker(self, name: str = "w", shadow: bool = False) -> None:
        """A worker with a main and, if wanted, a shadow."""
        await self.recovery.start(name, "run")
        if shadow:
            await self.recovery.recover(name)

    async def main_pid(self, name: str = "w") -> int:
        """The serving main's process, once there is one."""

        async def serving() -> int:
            state = await look(self.store, name)
            return 0 if state.serving is None else state.serving.registered.pid

        return await until(serving, what="a serving engine")

    async def events(self, trajectory: str) -> list[AnyEvent]:
        return events_of(await Reader(self.store, ids.trajectory(trajectory)).catch_up())

    async def findings(self) -> list[str]:
        """What an audit of all trajectories has to say against them."""
        entries: list[tuple[ids.StreamId, Entry]] = []
        for stream in await self.store.streams(ids.StreamKind.TRAJECTORY):
            entries += [(stream, entry) async for entry in read_entries(self.store, stream)]
        return [str(finding) for finding in audit(entries).findings]

    @asynccontextmanager
    async def gateway(
        self, workers: str = "w", tokenizer: Tokenizer | None = None, **settings: Any
    ) -> AsyncIterator[Client]:
        """A gateway in this process, and a client of it."""
        made = Settings(
            **{"grace_s": 0.05, "engine_wait_s": DEADLINE_S, "silence_s": DEADLINE_S, "drain_s": 0.0, **settings}
        )
        async with AsyncExitStack() as stack:
            served = await stack.enter_async_context(
                serving(self.store, workers.split(), self.report, made, tokenizer, "127.0.0.1", 0)
            )
            connector = aiohttp.TCPConnector(socket_factory=small_socket)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            yield Client(served.address, session, served)


@asynccontextmanager
async def site(
    folder: Path, store: JournalStore | None = None, tokens_per_s: float = 2000.0, recording: TokenRecording = RECORDING
) -> AsyncIterator[Site]:
    """Ends every engine that any worker of it has had."""
    (folder / "r.recording.json").write_bytes(msgspec.json.encode(recording))
    held = folder / "hold"
    options = {"tokens_per_s": tokens_per_s, "silence_s": DEADLINE_S}
    host = RecordedEngineHost(folder, folder / "log", owner_pid=os.getpid(), hold=held, **options)
    journal = store or MemoryStore()
    made = Site(journal, host, WorkerRecovery(journal, host, host_name(), "test"), held)
    try:
        yield made
    finally:
        await asyncio.gather(*made.recoveries)
        for stream in await journal.streams(ids.StreamKind.WORKER):
            for engine in (await look(journal, stream.name)).engines.values():
                await host.kill(process_of(engine))


def small_socket(where: tuple[Any, ...]) -> socket.socket:
    """With little room for what is not read, so that a slow reader is one soon."""
    made = socket.socket(*where[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    return made


@dataclass
class Client:
    """Rollout code."""

    address: str
    session: aiohttp.ClientSession
    served: Serving | None = None

    async def ask(self, path: str = "/generate", headers: Mapping[str, str] | None = None, **body: Any) -> Answered:
        """A request that is answered whole."""
        async with self.session.post(self.address + path, json=body, headers=headers) as response:
            return Answered(response.status, dict(response.headers), await response.json(content_type=None))

    async def get(self, path: str) -> Answered:
        async with self.session.get(self.address + path) as response:
            return Answered(response.status, dict(response.headers), await response.json())

    @asynccontextmanager
    async def stream(
        self, path: str = "/generate", headers: Mapping[str, str] | None = None, **body: Any
    ) -> AsyncIterator[Stream]:
        """A request whose answer is read as it comes."""
        async with self.session.post(self.address + path, json={**body, "stream": True}, headers=headers) as response:
            assert response.status == 200, await response.text()
            yield Stream(response)


@dataclass
class Answered:
    status: int
    headers: Mapping[str, str]
    body: dict[str, Any]

    @property
    def error(self) -> str:
        return f"{self.body['error']['type']}: {self.body['error']['message']}"


class Stream:
    """One stream of server-sent events and what came of it."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""
        self.offset = 0
        self.finish: Any = None
        self.info: dict[str, Any] = {}
        self.events: list[dict[str, Any]] = []
        self.done = False

    async def read(self, tokens: int = 1 << 30, events: int = 1 << 30) -> Stream:
        """Read until so many tokens or events are here, or the stream ends."""
        while len(self.tokens) < tokens and len(self.events) < events and not self.done:
            line = await self._response.content.readline()
            if not line or line == b"data: [DONE]\n":
                self.done = True
            elif line.startswith(b"id: "):
                self.offset = int(line[4:])
            elif line.startswith(b"data: "):
                self._take(json.loads(line[6:]))
        return self

    def _take(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if "meta_info" not in event:
            return
        self.info = event["meta_info"]
        self.tokens += event["output_ids"]
        self.text += event.get("text", "")
        self.logprobs += [entry[0] for entry in self.info.get("output_token_logprobs", [])]
        self.finish = self.info["finish_reason"]
