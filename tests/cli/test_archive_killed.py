"""`belayer archive run` killed again and again while others write: both sides together have everything, once."""

from __future__ import annotations

import asyncio
import json
import random
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest

from belayer import ids
from belayer.errors import FencedError
from belayer.journal.connect import open_store
from belayer.journal.events import GenerationStarted
from tests.archives import across, end_trajectory, whole, write_trajectory
from tests.cli.command import COMMAND, ROOT, belayer, environment
from tests.waiting import DEADLINE_S, until

KILLS = 3


@pytest.mark.chaos
async def test_an_archiver_killed_at_random_instants(redis_url: str, namespace: str, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    place = {"BELAYER_JOURNAL_URL": redis_url, "BELAYER_NAMESPACE": namespace, "BELAYER_ARCHIVE_URL": str(folder)}
    store = await open_store(redis_url, namespace=namespace, timeout_s=DEADLINE_S)
    names = [f"t{number}" for number in range(24)]
    writers = [await write_trajectory(store, name, 5) for name in names]
    for name, writer in zip(names, writers, strict=True):
        await end_trajectory(store, name, writer)
    expected = await whole(store, names)
    source = random.Random(7)

    async def stands_at(marks: int) -> bool:
        lasts = [await store.read(ids.trajectory(name), 0, 1) for name in names]
        return sum(entries[0].expected_sequence > 0 for entries in lasts) >= marks

    for kill in range(KILLS):
        command = [*COMMAND, "archive", "run"]
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment(**place), stdout=PIPE)
        wanted = source.randint(kill * 7, kill * 7 + 6)

        async def begun(process: Process = process, wanted: int = wanted) -> bool:
            return process.returncode is not None or await stands_at(wanted)

        await until(begun, what="some trajectories archived")
        if process.returncode is None:
            process.kill()
        await process.communicate()
        assert await whole(across(store, folder / namespace, namespace), names) == expected
    done = await asyncio.to_thread(belayer, "archive", "run", "--json", **place)
    assert json.loads(done.stdout)["left"] == {}
    assert await stands_at(len(names))
    assert await whole(across(store, folder / namespace, namespace), names) == expected
    verified = json.loads((await asyncio.to_thread(belayer, "archive", "verify", "--json", **place)).stdout)
    assert verified["problems"] == []
    for writer in writers:
        with pytest.raises(FencedError):
            await writer.append(GenerationStarted(2, "", ""))
    await store.close()
