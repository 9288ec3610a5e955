"""A real cluster and a real Sentinel set-up for the whole session, for tests that break nothing."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeVar

import pytest

from belayer.journal.connect import open_store
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.memory_store import MemoryStore
from tests.journal import acl
from tests.journal.topologies import Cluster, Sentineled, cluster, sentineled
from tests.waiting import DEADLINE_S

T = TypeVar("T")


@contextlib.contextmanager
def kept_running(made: Callable[[Path], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """What the context gives, in an event loop of a thread of its own, because tests have a loop each."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="test-servers")
    thread.start()
    with tempfile.TemporaryDirectory(prefix="belayer-test-") as folder:
        context = made(Path(folder) / "s")
        try:
            yield asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result()
        finally:
            asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    """Three primaries without replicas."""
    with kept_running(cluster) as made:
        yield made


@pytest.fixture(scope="session")
def shared_sentinels() -> Iterator[Sentineled]:
    """A primary with one replica, and three sentinels."""
    with kept_running(sentineled) as made:
        yield made


@pytest.fixture(scope="session")
def server_with_users() -> Iterator[EmbeddedServer]:
    """A server with the users of docs/security.md."""
    with kept_running(acl.server_with_users) as made:
        yield made


@pytest.fixture(params=["memory", "redis", "redis-3-shards", "redis-least-permissions", "cluster", "sentinel"])
async def store(request: pytest.FixtureRequest, namespace: str):
    """Each JournalStore that there is, over a real server where it has one."""
    match request.param:
        case "memory":
            yield MemoryStore()
            return
        case "cluster":
            url, options = request.getfixturevalue("shared_cluster").url, {}
        case "sentinel":
            url, options = request.getfixturevalue("shared_sentinels").url, {"durability": "replicated"}
        case "redis-least-permissions":
            url, options = acl.url_of(request.getfixturevalue("server_with_users"), acl.ACTORS), {}
        case "redis-3-shards":
            url, options = request.getfixturevalue("redis_url"), {"shards": 3}
        case _:
            url, options = request.getfixturevalue("redis_url"), {}
    store = await open_store(url, namespace=namespace, timeout_s=DEADLINE_S, **options)
    yield store
    await store.close()
