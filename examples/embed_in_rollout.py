"""Embed Belayer in your own rollout code: journal a trajectory as it happens, go on from it after a crash.

python examples/embed_in_rollout.py             # BELAYER_JOURNAL_URL, or a server of its own for the try
"""

import asyncio
import hashlib

from belayer.client import Trajectory
from belayer.journal.connect import open_store


async def main() -> None:
    store = await open_store(None)
    async with await Trajectory.open(store, "example-1") as trajectory:
        if trajectory.state.phase == "empty":
            await trajectory.start(run="example", task="say hello", prompt=[1, 2, 3])

        # Your engine's stream: tokens go to the journal in chunks, at the latest after 100 ms.
        await trajectory.begin_generation(worker="engine-0")
        for token in (101, 102, 103):
            await trajectory.append_tokens([token], [-0.25], weight_version=7)
        await trajectory.finish_generation("stop")

        # Your environment: the intent before it runs, the outcome after. This is the boundary.
        await trajectory.start_action("echo hello", timeout_s=60, sandbox_incarnation="container-1")
        output = b"hello\n"
        digest = hashlib.blake2b(output, digest_size=16).digest()
        boundary = await trajectory.commit_action(0, list(output), digest, duration_s=0.1)
        print("committed", boundary, "context", trajectory.state.context())
        await trajectory.finish("done", reward=1.0)
    await store.close()


asyncio.run(main())
