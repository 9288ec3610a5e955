"""A few started containers that wait, so that a quiet checkpoint is brought back without waiting for Docker.

A spare is made when a container like it is captured or restored, at most one of a kind and few in all; it belongs to
the run of the container that it is like, and is removed with it. It waits under a name of its own, and whoever renames
its folder first has it: so spares are shared between the processes of a machine, and none serves two trajectories. A
spare whose kind has no other container any more is removed by the next to look.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
import structlog

from belayer import ids
from belayer.errors import SandboxError
from belayer.sandbox.home import Home
from belayer.sandbox.making import Maker
from belayer.sandbox.owner import Owner

PREFIX = "belayer-spare-"
log = structlog.get_logger("belayer.sandbox")


class Spares:
    """The spares of one Belayer folder, as one process sees them."""

    def __init__(self, home: Home, maker: Maker, remove: Callable[[str], Awaitable[None]], limit: int) -> None:
        self._home = home
        self._maker = maker
        self._remove = remove
        self._limit = limit
        self._making: dict[str, asyncio.Task[None]] = {}

    def find(self, key: str) -> list[str]:
        """Those of this kind, ready or not."""
        return [name for name in self._home.run_folders() if name.startswith(f"{PREFIX}{key}")]

    def want(self, like: Owner) -> None:
        """See to it, in the background, that one like this waits."""
        if self._limit > 0 and not like.spec.read_only and like.key not in self._making:
            task = asyncio.create_task(self._make(like), name=f"spare {like.key}")
            self._making[like.key] = task
            task.add_done_callback(lambda _: self._making.pop(like.key, None))

    async def settled(self) -> None:
        """Return once nothing is being made."""
        while self._making:
            await asyncio.gather(*self._making.values(), return_exceptions=True)

    async def close(self) -> None:
        """Give up what is being made. What waits goes on waiting, for other processes."""
        for task in list(self._making.values()):
            task.cancel()
        await self.settled()

    async def _make(self, like: Owner) -> None:
        await self._remove_useless()
        if self.find(like.key) or len(self.find("")) >= self._limit:
            return
        name = f"{PREFIX}{like.key}-{ids.new_suffix()}"
        owner = msgspec.structs.replace(like, trajectory="", container_id="", traits="")
        try:
            await self._maker.fresh(name, owner)
            if like.key not in self._kinds_in_use():
                await self._remove(name)
        except (SandboxError, OSError) as error:  # OSError: its folder was removed, with its run
            log.info("no spare container could be made", run=like.run, error=str(error))
            with suppress(SandboxError):
                await self._remove(name)
        except BaseException:
            with suppress(SandboxError):
                await asyncio.shield(self._remove(name))
            raise

    async def _remove_useless(self) -> None:
        used = self._kinds_in_use()
        for name in self.find(""):
            if name.removeprefix(PREFIX).partition("-")[0] not in used:
                await self._remove(name)

    def _kinds_in_use(self) -> set[str]:
        owners = (self._home.owner(name) for name in self._home.run_folders() if not name.startswith(PREFIX))
        return {owner.key for owner in owners if owner is not None}
