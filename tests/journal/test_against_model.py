"""Redis against the reference in memory, over arbitrary calls: right, stale, repeated, wrong, with lost replies.

Both stores get the very same bytes; every answer and every refusal must be the same, and so must what is stored. The
server is also killed and started again at any point (its file is synced at every write, so nothing may be lost).
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from belayer import ids
from belayer.errors import JournalError
from belayer.journal.codec import Entry, encode_entry
from belayer.journal.connect import open_store
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.events import EpochStarted, GenerationStarted
from belayer.journal.memory_store import MemoryStore
from belayer.journal.store import JournalStore
from belayer.journal.writer import Reader
from tests.journal.faults import Proxy
from tests.waiting import DEADLINE_S, within

STREAMS = [ids.trajectory("a"), ids.trajectory("b"), ids.sandbox("a")]
streams = st.sampled_from(STREAMS)
MOST = 9
faults = st.integers(0, MOST)
"""The highest numbers are the machine's kinds of faults; below them nothing happens."""


def outcome_of(result: Any) -> Any:
    """A result that can be compared; of an error its type and facts."""
    if isinstance(result, JournalError):
        return type(result), {name: value for name, value in vars(result).items() if not name.startswith("_")}
    return result


async def settled(call: Awaitable[Any]) -> Any:
    """The call's result, or the error of ours that it raised."""
    try:
        return await call
    except JournalError as error:
        return error


class Writer:
    """What one writer believes about one stream; it may be long out of date."""

    def __init__(self, epoch: int, sequence: int, digest: bytes) -> None:
        self.epoch, self.sequence, self.digest = epoch, sequence, digest


class Comparison(RuleBasedStateMachine):
    kinds: tuple[str, ...] = ("reply lost", "reply lost", "server killed", "server killed")

    @initialize()
    def open(self) -> None:
        self.loop = self.new_loop()
        self.folder = tempfile.TemporaryDirectory(prefix="belayer-test-")
        self.model = MemoryStore()
        self.writers: dict[ids.StreamId, list[Writer]] = {stream: [] for stream in STREAMS}
        self.sent: list[tuple[ids.StreamId, Entry]] = []
        self.run(self.start())

    def new_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()

    def end_loop(self) -> None:
        self.loop.close()

    async def start(self) -> None:
        self.server = EmbeddedServer(Path(self.folder.name), settings={"appendfsync": "always"})
        await self.server.__aenter__()
        self.proxy = Proxy(Path(self.folder.name), self.server.url)
        self.proxying = self.proxy.running()
        await self.proxying.__aenter__()
        self.redis: JournalStore = await open_store(self.proxy.url, timeout_s=DEADLINE_S)

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.run(self.stop())
            self.folder.cleanup()
            self.end_loop()

    async def stop(self) -> None:
        if hasattr(self, "redis"):
            await self.redis.close()
        await self.proxying.__aexit__(None, None, None)
        await self.server.stop()

    def run(self, work: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(within(work))

    def both(self, call: Callable[[JournalStore], Awaitable[Any]], fault: int = 0, word: bytes = b"") -> Any:
        """The outcome of the call, the same on both stores."""
        expected = self.run(settled(call(self.model)))
        if MOST - fault < len(self.kinds):
            found = self.run(self.struck(self.kinds[MOST - fault], call, word))
        else:
            found = self.run(settled(call(self.redis)))
        assert outcome_of(found) == outcome_of(expected)
        return expected

    async def struck(self, kind: str, call: Callable[[JournalStore], Awaitable[Any]], word: bytes) -> Any:
        """The outcome of the call with a fault around it; `word` is in its request."""
        if kind == "reply lost":
            self.proxy.lose_reply(word)
        else:
            await self.server.kill()
            await self.server.start()
        found = await settled(call(self.redis))
        self.proxy.lose_reply(b"\0never")
        return found

    # --- rules ------------------------------------------------------------------------------------------------------

    @rule(stream=streams, fault=faults)
    def take_over(self, stream: ids.StreamId, fault: int) -> None:
        reader = Reader(self.model, stream)
        self.run(reader.catch_up())
        epoch = reader.epoch + 1
        entry, digest = encode_entry(
            epoch, reader.sequence, reader.digest, [EpochStarted(epoch, "w")], [ids.new_event_id()], time.time_ns()
        )
        after = reader.last_entry
        self.both(lambda store: store.take_over(stream, after, entry), fault, b"EVAL")
        self.writers[stream].append(Writer(epoch, entry.last_sequence, digest))
        self.sent.append((stream, entry))

    @rule(stream=streams, data=st.data(), events=st.integers(1, 20), noticed=st.booleans(), fault=faults)
    def append(self, stream: ids.StreamId, data: st.DataObject, events: int, noticed: bool, fault: int) -> None:
        if not self.writers[stream]:
            return
        writer = data.draw(st.sampled_from(self.writers[stream][-3:]))
        group = [GenerationStarted(number, "w", "i") for number in range(events)]
        event_ids = [ids.new_event_id() for _ in group]
        entry, digest = encode_entry(writer.epoch, writer.sequence, writer.digest, group, event_ids, time.time_ns())
        tag = "generation-started" if noticed else None
        outcome = self.both(lambda store: store.append(stream, entry, tag), fault, b"XADD")
        if outcome is None:
            writer.sequence, writer.digest = entry.last_sequence, digest
            self.sent.append((stream, entry))

    @rule(data=st.data(), fault=faults)
    def append_again(self, data: st.DataObject, fault: int) -> None:
        if self.sent:
            stream, entry = data.draw(st.sampled_from(self.sent))
            self.both(lambda store: store.append(stream, entry), fault, b"XADD")

    @rule(stream=streams, after=st.integers(0, 60), limit=st.integers(1, 20))
    def read(self, stream: ids.StreamId, after: int, limit: int) -> None:
        self.both(lambda store: store.read(stream, after, limit))
        self.both(lambda store: store.wait(stream, after, 0.0))

    @rule(stream=streams)
    def remove(self, stream: ids.StreamId) -> None:
        self.both(lambda store: store.remove(stream))
        self.writers[stream].clear()
        self.sent = [sent for sent in self.sent if sent[0] != stream]

    @invariant()
    def hold_the_same(self) -> None:
        if not hasattr(self, "redis"):
            return
        self.both(lambda store: store.streams())
        for stream in STREAMS:
            self.both(lambda store, stream=stream: store.last(stream))
            self.both(lambda store, stream=stream: store.read(stream))


Comparison.TestCase.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)
TestAgainstModel = Comparison.TestCase
