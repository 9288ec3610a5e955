"""The other actor processes of this host: what one of them had at hand when it ended goes to a living one at once.

A notice that its consumer no longer renews is stale after a while, and that is all that is known of a consumer on
another host. The death of one here is seen the instant it comes, by its pidfd. Who has a notice says so by its name
(`names.py`), incarnation by incarnation; whoever has ever been seen with one is watched for all groups together. A name
whose process id somebody else has by now is left to the lease, as are notices that a dying renewal takes back.

Two heirs of one dead process may both come away with a notice: a look too many, since an epoch decides who acts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from belayer.actors.names import local_pid
from belayer.errors import CodecError, JournalUnavailableError
from belayer.journal.store import Subscription
from belayer.processes import start_ticks, wait_exit


class Peers:
    """The peers of one process, `consumer` in every group that it joins."""

    def __init__(self, host: str, consumer: str) -> None:
        self._host = host
        self._consumer = consumer
        self._groups: list[Subscription] = []
        self._watched: dict[str, asyncio.Task[None]] = {}

    @property
    def watched(self) -> list[str]:
        """The peers whose end is waited for."""
        return list(self._watched)

    @asynccontextmanager
    async def inheriting(self, notices: Subscription, look_every_s: float) -> AsyncGenerator[None]:
        """While the block runs, what a dead peer has in this group comes to `notices`. It is looked for new peers every
        `look_every_s`, which is also how long the death of one takes that nobody had seen before."""
        self._groups.append(notices)
        looking = asyncio.create_task(self._look(notices, look_every_s))
        try:
            yield
        finally:
            self._groups.remove(notices)
            ending = [looking, *(() if self._groups else self._watched.values())]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    async def _look(self, notices: Subscription, every_s: float) -> None:
        while True:
            with suppress(JournalUnavailableError):
                for name in await notices.holders():
                    pid = local_pid(f"actors/{name}", self._host)
                    if pid and name != self._consumer and name not in self._watched:
                        self._watched[name] = asyncio.create_task(self._inherit(name, pid))
            await asyncio.sleep(every_s)

    async def _inherit(self, name: str, pid: int) -> None:
        try:
            await wait_exit(pid, start_ticks(pid))
            for notices in self._groups:
                await notices.inherit(name)
        except (JournalUnavailableError, CodecError):
            return  # what is still there is seen at the next look, or goes stale
        finally:
            del self._watched[name]
