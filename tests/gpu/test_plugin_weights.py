"""When an update of the weights counts as whole: against a real memory server, with SGLang's calls made by hand."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from belayer.gpu import wire
from belayer.gpu.memory_client import MemoryClient
from belayer.gpu.memory_server import MemoryServer
from belayer.gpu.plugin.link import Link
from belayer.gpu.plugin.ranks import Ranks
from belayer.gpu.plugin.weights import Weights
from tests.gpu.lessee import Lessee
from tests.waiting import DEADLINE_S


class Mapper:
    """Of memory that is not mapped; knows whether it would be writable."""

    writable = False

    def protect(self, address: int, fd: int, size_bytes: int, *, writable: bool) -> None:
        os.close(fd)
        self.writable = writable

    def synchronize(self) -> None: ...


@dataclass
class OwnLink:
    """A main's link, in this process."""

    client: MemoryClient
    own_mapper: Mapper
    ranks: Ranks

    def mapper(self) -> Mapper:
        return self.own_mapper


@dataclass
class Call:
    """An update request, as far as the plugin looks at one."""

    weight_version: str | None
    flush_cache: bool


@dataclass
class Result:
    success: bool
    message: str


class Trained:
    """An engine's weights under a memory server."""

    def __init__(self, weights: Weights, mapper: Mapper, path: Path) -> None:
        self.weights = weights
        self.mapper = mapper
        self._path = path

    @property
    def state(self) -> wire.Weights:
        """In the memory server."""
        with MemoryClient.connect(self._path, "host", "control")[0] as client:
            return client.ask(wire.AskStatus(), wire.Status)[0].weights

    def update(
        self,
        version: int | None = 7,
        flush: bool = False,
        failure: str = "",
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        def original(manager: Any, call: Any) -> Result:
            assert self.mapper.writable
            meanwhile()
            return Result(not failure, failure)

        self.weights.update(original, None, Call(None if version is None else str(version), flush))


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Trained]:
    """A main that serves version 0."""
    path = tmp_path / "memory.sock"
    server = MemoryServer("cpu", path)
    ready = threading.Event()
    thread = threading.Thread(target=server.serve, args=(ready.set,))
    thread.start()
    assert ready.wait(DEADLINE_S)
    lessee = Lessee()
    lessee.connect(str(path), "main", "main")
    lessee.open_weights()
    lessee.commit(0)
    lessee.open_arena()
    assert lessee.client is not None
    mapper = Mapper()
    weights = Weights(cast("Link", OwnLink(lessee.client, mapper, Ranks())))
    yield Trained(weights, mapper, path)
    lessee.client.close()
    assert lessee.ledger is not None
    lessee.ledger.close()
    server.stop()
    thread.join(10)


def test_half_an_update_is_not_made_whole_by_a_forward_pass(trained: Trained) -> None:
    trained.update()
    trained.weights.are_used()
    assert trained.state == wire.Weights("writing", 7, "main") and trained.mapper.writable
    assert trained.weights.version == 7, "what the tokens say"
    trained.update()
    assert trained.state.state == "writing"
    trained.update(flush=True)
    assert trained.state == wire.Weights("ready", 7) and not trained.mapper.writable


def test_a_flush_or_a_continue_of_its_own_ends_an_update(trained: Trained) -> None:
    trained.weights.ended()
    assert trained.state == wire.Weights("ready", 0), "there was none"
    trained.update(None)
    trained.weights.ended()
    assert trained.state == wire.Weights("ready", 1) and trained.weights.version == 1


def test_a_flush_within_the_call_does_not_end_it_before_all_ranks_say_that_it_succeeded(trained: Trained) -> None:
    within: list[str] = []

    def flush() -> None:
        trained.weights.ended()
        within.append(trained.state.state)

    trained.update(flush=True, meanwhile=flush)
    assert within == ["writing"] and trained.state == wire.Weights("ready", 7)


def test_a_bucket_that_brings_nothing_leaves_what_was_there(trained: Trained) -> None:
    trained.update(failure="Failed to get weights: no such folder")
    assert trained.state == wire.Weights("ready", 0) and trained.weights.version == 0
    trained.update()
    trained.update(failure="Failed to get weights: no such folder")
    assert trained.state == wire.Weights("writing", 7, "main"), "the first bucket has been written"


def test_an_update_that_failed_half_way_is_ended_by_nothing_but_another_one(trained: Trained) -> None:
    trained.update(failure="a tensor does not fit")
    trained.weights.ended()
    assert trained.state.state == "writing"
    trained.update(flush=True)
    assert trained.state == wire.Weights("ready", 7)
