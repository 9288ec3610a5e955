"""An actor process that never finishes: `holder.py URL NAMESPACE HOST`. It says each notice that it takes."""

from __future__ import annotations

import asyncio
import os
import sys

from belayer.actors.actor import run_actor
from belayer.actors.names import new_name
from belayer.journal.connect import open_store
from belayer.journal.store import Notice

STALE_AFTER_S = 1000.0


class Holder:
    """Takes every notice of a started trajectory, and has it for as long as its process lives."""

    name = "holder"
    tags = frozenset({"trajectory-started"})
    concurrency = 10
    stale_after_s = STALE_AFTER_S

    async def handle(self, notice: Notice) -> None:
        os.write(1, f"{notice.stream.name}\n".encode())
        await asyncio.Event().wait()


async def main(url: str, namespace: str, host: str) -> None:
    store = await open_store(url, namespace=namespace)
    await run_actor(store, Holder(), host, new_name(host).removeprefix("actors/"))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
