"""Takes a trajectory's epoch over for a request and brings the trajectory to where the request's generation begins.

Everything that is needed for that is one append. So whoever dies here leaves the trajectory as it was or ready; the
next one reads it and sees which.
"""

from __future__ import annotations

import hashlib
import math
import time
from typing import NamedTuple

from belayer import ids
from belayer.client import CHUNK_TOKENS, Trajectory, wait_resumed
from belayer.errors import WrongSequenceError
from belayer.gpu.gateway.errors import later
from belayer.gpu.gateway.history import Place, place, read, writer_of
from belayer.gpu.gateway.request import Asked
from belayer.gpu.gateway.text import Tokenizer
from belayer.journal.columns import pack_token_ids
from belayer.journal.events import ActionCommitted, ActionStarted, AnyEvent, Rewound, TrajectoryStarted
from belayer.journal.store import JournalStore
from belayer.journal.writer import Reader, take_over
from belayer.projections.trajectory import Generation, TrajectoryState, evolve, fold

GIVEN = "(tokens that the caller added to the prompt)"
"""The command of the action that stands for them."""
_NEVER_S = math.inf


class Opened(NamedTuple):
    """`trajectory` is None when the generation is finished: then nothing is written."""

    trajectory: Trajectory | None
    prompt: list[int]
    generation: Generation | None
    """The request's own, as far as an earlier gateway brought it."""


async def opened(store: JournalStore, asked: Asked, tokenizer: Tokenizer | None, run: str, recovery_s: float) -> Opened:
    """Open the request's trajectory. RefusedError when it cannot take the request; may be repeated after any error."""
    stream = ids.trajectory(asked.name)
    deadline = time.monotonic() + recovery_s
    while True:
        reader = Reader(store, stream)
        history = read(await reader.catch_up())
        if history.state.phase == "recovering":
            await _resumption(store, asked, deadline)
            continue
        found = place(history, asked, tokenizer)
        if found.generation is not None and found.generation.finish_reason is not None:
            return Opened(None, found.prompt, found.generation)
        try:
            writer, events = await take_over(store, stream, writer_of(asked), only_at=reader.sequence)
        except WrongSequenceError:
            continue
        state = fold(events)
        if needed := _needed(state, asked, found, run):
            last = await writer.append(*needed)
            for sequence, event in enumerate(needed, last - len(needed) + 1):
                state = evolve(state, sequence, event)
        return Opened(Trajectory(writer, state, CHUNK_TOKENS, _NEVER_S), found.prompt, found.generation)


def _needed(state: TrajectoryState, asked: Asked, found: Place, run: str) -> list[AnyEvent]:
    """What must be in the journal before the generation may begin."""
    if state.phase == "empty":
        task = asked.task or asked.name
        return [TrajectoryStarted(run, task, pack_token_ids(found.prompt), {"gateway_rid": asked.rid})]
    if found.rewind is not None:
        return [Rewound(*found.rewind, f"request {asked.rid} asks again from here")]
    if found.observation:
        number = state.boundary.number + 1
        packed = pack_token_ids(found.observation)
        digest = hashlib.blake2b(packed, digest_size=16).digest()
        started = ActionStarted(number, GIVEN, 0.0, state.sandbox_incarnation)
        return [started, ActionCommitted(number, 0, packed, digest, 0.0)]
    return []


async def _resumption(store: JournalStore, asked: Asked, deadline: float) -> None:
    """Wait until nobody is recovering the trajectory."""
    try:
        await wait_resumed(store, asked.name, deadline - time.monotonic())
    except TimeoutError as error:
        raise later("under_recovery", f"{error}; ask again with the same rid", 5) from None
