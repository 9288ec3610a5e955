"""One real Redis server for the whole session, and a namespace of its own for every test."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest

from belayer.journal.connect import open_store
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.redis_store import RedisStore
from tests.waiting import DEADLINE_S

signal.signal(signal.SIGINT, signal.default_int_handler)
"""A shell that starts the tests in the background ignores SIGINT; what they start and interrupt would inherit that."""

hypothesis.settings.register_profile("belayer", deadline=None)
hypothesis.settings.load_profile("belayer")
"""How long one example takes says something about the machine's load and nothing about us."""


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """The session's server. Its event loop runs in a thread, because tests have a loop each."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="test-server")
    thread.start()
    with tempfile.TemporaryDirectory(prefix="belayer-test-") as folder:
        server = EmbeddedServer(Path(folder))
        try:
            asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
            yield server.url
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses."""
    return f"test-{os.urandom(6).hex()}"


@pytest.fixture
async def redis_store(redis_url: str, namespace: str) -> AsyncIterator[RedisStore]:
    """A fresh journal on the session's server."""
    store = await open_store(redis_url, namespace=namespace, timeout_s=DEADLINE_S)
    yield store
    await store.close()
