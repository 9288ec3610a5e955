"""What a trainer says when its new weights are out, so that no more requests go to engines with older ones."""

from __future__ import annotations

from belayer import ids
from belayer.errors import FencedError, InputError, WrongSequenceError
from belayer.journal.events import WeightsPublished
from belayer.journal.store import JournalStore
from belayer.journal.writer import Reader, take_over
from belayer.projections import run as runs
from belayer.projections import worker


async def publish_weights(store: JournalStore, run: str, version: int) -> tuple[list[str], list[str]]:
    """Say that requests of the run want weights of this version or newer; saying it again changes nothing.

    Returns the run's workers, and those whose main does not serve them yet as far as the journal knows: these get no
    new requests until it does. InputError when the run has no workers.
    """
    found = await _workers(store, run, version)
    stream = ids.run(run)
    while True:
        reader = Reader(store, stream)
        if runs.fold(await reader.catch_up()).weight_version >= version:
            return found
        try:
            writer, _ = await take_over(store, stream, "trainer", only_at=reader.sequence)
            await writer.append(WeightsPublished(version))
            return found
        except (FencedError, WrongSequenceError):
            continue


async def _workers(store: JournalStore, run: str, version: int) -> tuple[list[str], list[str]]:
    of_run: list[str] = []
    behind: list[str] = []
    for stream in sorted(await store.streams(ids.StreamKind.WORKER)):
        state = worker.fold(await Reader(store, stream).catch_up())
        if state.run == run:
            of_run.append(stream.name)
            if state.serving is None or state.serving.weight_version < version:
                behind.append(stream.name)
    if not of_run:
        raise InputError(f"no worker belongs to run {run}; `belayer status` lists the runs")
    return of_run, behind
