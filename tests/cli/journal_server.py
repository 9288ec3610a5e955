"""A real server that holds a story's journal, for tests of the command that run without a loop of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from belayer.journal.connect import open_store
from belayer.journal.embedded import EmbeddedServer
from tests.replay.journals import Story


@contextmanager
def serving(story: Story, folder: Path) -> Iterator[EmbeddedServer]:
    """The embedded server with the story's entries in it."""
    with asyncio.Runner() as runner:
        server = EmbeddedServer(folder)
        runner.run(server.__aenter__())
        try:
            runner.run(_fill(server.url, story))
            yield server
        finally:
            runner.run(server.stop())


async def _fill(url: str, story: Story) -> None:
    store = await open_store(url)
    for stream, entry in story.entries():
        await store.append(stream, entry)
    await store.close()
