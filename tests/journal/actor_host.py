"""An actor on a host of its own: `actor_host.py URL NAMESPACE NAME`. It finishes every trajectory that was started.

It says `ready`, then the name of each trajectory that it finished, a line each. It leaves its group at SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from belayer.actors.actor import run_actor
from belayer.journal.connect import open_store
from belayer.journal.events import ActionStarted, TrajectoryFinished, TrajectoryStarted, tag_of
from belayer.journal.store import JournalStore, Notice
from belayer.journal.writer import events_of, take_over

GROUP_HOST = "everywhere"
STALE_AFTER_S = 1.0
STEPS = 5


class Finisher:
    """Works on a trajectory in steps, under its epoch, and finishes it unless that was done."""

    name = "finisher"
    tags = frozenset({tag_of(TrajectoryStarted("", "", b""))})
    concurrency = 2
    stale_after_s = STALE_AFTER_S

    def __init__(self, store: JournalStore, consumer: str) -> None:
        self._store = store
        self._consumer = consumer

    async def handle(self, notice: Notice) -> None:
        writer, history = await take_over(self._store, notice.stream, self._consumer)
        if any(isinstance(event, TrajectoryFinished) for event in events_of(history)):
            return
        for step in range(STEPS):
            await writer.append(ActionStarted(step + 1, "true", 1.0, self._consumer))
        await writer.append(TrajectoryFinished(self._consumer))
        say(notice.stream.name)


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


async def main(url: str, namespace: str, consumer: str) -> None:
    store = await open_store(url, namespace=namespace)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    say("ready")
    try:
        await run_actor(store, Finisher(store, consumer), GROUP_HOST, consumer)
    except asyncio.CancelledError:
        say("left")
    finally:
        await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
