"""Embed Belayer in your own rollout code: journal a trajectory as it happens, go on from it after a crash.

python examples/embed_in_rollout.py             # BELAYER_JOURNAL_URL, or a server of its own for the try

Kill it at any instant and start it again: what to do next is read from the journal, never remembered.
"""

import asyncio
import hashlib

from belayer.client import Trajectory
from belayer.errors import FencedError
from belayer.journal.connect import open_store
from belayer.journal.store import JournalStore
from belayer.projections.trajectory import Generation, TrajectoryState

REPLIES = [[101, 102, 103], [104, 105]]
"""What your engine would say, turn by turn: token ids."""
COMMANDS = ["echo hello", "echo world"]


async def main() -> None:
    store = await open_store(None)
    state = await roll_out(store, "example-1")
    print(state.phase, state.boundary, "context", state.context())
    await store.close()


async def roll_out(store: JournalStore, name: str) -> TrajectoryState:
    """Bring the trajectory to its end, from wherever it stands."""
    while True:
        try:
            # Takes the epoch: whoever wrote this trajectory before is shut out. One under recovery is waited for.
            async with await Trajectory.open(store, name) as trajectory:
                if trajectory.state.phase == "empty":
                    await trajectory.start(run="example", task="say hello", prompt=[1, 2, 3])
                while trajectory.state.phase == "open":
                    await go_on(trajectory)
                return trajectory.state
        except FencedError:  # a recovery has rewound the trajectory: open it again and go on from there
            continue


async def go_on(trajectory: Trajectory) -> None:
    """The next turn, or what is left of it."""
    state = trajectory.state
    turn = state.boundary.number
    if turn == len(REPLIES):
        await trajectory.finish("done", reward=1.0)
        return

    has_spoken = bool(state.segments) and isinstance(state.segments[-1], Generation)
    if state.action is None and not has_spoken:
        # Your engine's stream: tokens go to the journal in chunks, at the latest after 100 ms. After a crash of this
        # process or of the engine some are there already: ask the engine to go on after `state.context()`.
        there = await trajectory.begin_generation(worker="engine-0")
        for token in REPLIES[turn][there:]:
            await trajectory.append_tokens([token], [-0.25], weight_version=7)
        await trajectory.finish_generation("stop")

    # Your environment: the intent before it runs, the outcome after. This is the boundary. An action that was in
    # flight keeps its number; Belayer's own sandboxes run each number at most once.
    await trajectory.start_action(COMMANDS[turn], timeout_s=60, sandbox_incarnation="container-1")
    output = COMMANDS[turn].removeprefix("echo ").encode() + b"\n"
    digest = hashlib.blake2b(output, digest_size=16).digest()
    await trajectory.commit_action(0, list(output), digest, duration_s=0.1)


if __name__ == "__main__":
    asyncio.run(main())
