"""Several copies of one checkpoint, each a running container that goes its own way: for tree search and best-of-n.

All copies or none: when one cannot be made, the others are removed. A copy is a full_restore like any other, so its
files are shared with the checkpoint where the disk can (reflink), the images are read from the page cache from the
second copy on, and memory of 64 MB or more comes when it is touched. The checkpoint stays until all are made, also when
its own trajectory has no more use for it. Checkpoints of the copies share with it what has not changed since.

The copies are equal at first, in user space too: a random generator that a background process has seeded gives the
same numbers in each, and process ids are the same. What asks the kernel (/dev/urandom, getrandom(2)) gets other bytes
in each. The wall clock and, on the same boot, the monotonic clock are the machine's: a restored process finds that time
has passed, and timers that were due meanwhile fire at once. Nothing tells a process that it was copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from belayer.errors import SandboxError
from belayer.journal.events import SandboxSpec
from belayer.sandbox.protocol import Incarnation, SandboxHost

AT_ONCE = 4
"""Restores that run at the same time: each of them copies files and memory."""


async def fork(
    host: SandboxHost, run: str, checkpoint: str, action: int, spec: SandboxSpec, copies: Mapping[str, str]
) -> dict[str, Incarnation]:
    """Restore the checkpoint once for each trajectory in `copies`, whose value is its incarnation's name.

    `action`: the boundary, as for `SandboxHost.restore`. RestoreFailedError: nothing is left of any copy.
    """
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(trajectory: str, incarnation: str) -> Incarnation:
        async with slots:
            return await host.restore(run, trajectory, incarnation, spec, checkpoint, action)

    with host.in_use(checkpoint):
        making = [asyncio.create_task(one(*names), name=f"fork {names[1]}") for names in copies.items()]
        try:
            return dict(zip(copies, await asyncio.gather(*making), strict=True))
        except BaseException:
            await asyncio.shield(_undo(host, making, copies))
            raise


async def _undo(host: SandboxHost, making: list[asyncio.Task[Incarnation]], copies: Mapping[str, str]) -> None:
    for task in making:
        if not task.cancelling():  # a second one would interrupt its own tidying, and ours would meet it
            task.cancel()
    await asyncio.gather(*making, return_exceptions=True)
    removed = await asyncio.gather(*map(host.remove, copies.values()), return_exceptions=True)
    for error in removed:
        if error is not None and not isinstance(error, SandboxError):
            raise error
