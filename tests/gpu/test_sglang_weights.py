"""Real SGLang on the CPU is given new weights in every way it knows, in mid-stream, before a kill, and half."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from belayer.gpu import wire
from belayer.gpu.errors import TornWeightsError
from belayer.gpu.memory_client import MemoryClient
from belayer.gpu.protocol import Sampling
from tests.gpu.sglang_cell import ENVIRONMENT, MARKS, PROMPTS, PYTHON, ROOT, TOKENS, Cell, run_through_a_failure
from tests.waiting import within

pytestmark = MARKS


@contextlib.asynccontextmanager
async def trainer() -> AsyncIterator[asyncio.subprocess.Process]:
    """benchmarks.weight_sender, which reads what to do line by line."""
    process = await asyncio.create_subprocess_exec(
        PYTHON,
        *("-m", "benchmarks.weight_sender"),
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def send(sender: asyncio.subprocess.Process, cell: Cell, arguments: str) -> dict[str, Any]:
    assert sender.stdin is not None and sender.stdout is not None
    sender.stdin.write(f"{cell.main.address} {arguments}\n".encode())
    return json.loads(await within(sender.stdout.readline()))


async def post(cell: Cell, path: str, body: dict[str, Any]) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{cell.main.address}/{path}", json=body) as response:
        assert response.status == 200, await response.text()


async def tokens_and_versions(cell: Cell, prompt: list[int], tokens: list[int], versions: list[int]) -> None:
    client = cell.host.connect(cell.main)
    async for batch in client.generate(f"v{os.urandom(4).hex()}", prompt, Sampling(max_new_tokens=TOKENS)):
        tokens += batch.token_ids
        versions += [batch.weight_version] * len(batch.token_ids)
    await client.close()


async def all_tokens(cell: Cell, version: int) -> list[list[int]]:
    """What the prompts give now, all of it from that version."""
    found: list[list[int]] = [[] for _ in PROMPTS]
    versions: list[int] = []
    await asyncio.gather(*(tokens_and_versions(cell, prompt, found[n], versions) for n, prompt in enumerate(PROMPTS)))
    assert set(versions) == {version}
    return found


async def test_a_stream_goes_on_over_an_update_and_every_token_says_its_version(cell: Cell, tmp_path: Path) -> None:
    tokens: list[int] = []
    versions: list[int] = []
    async with trainer() as sender:
        await send(sender, cell, f"--how save --seed 5 --folder {tmp_path}")
        stream = asyncio.create_task(tokens_and_versions(cell, PROMPTS[0], tokens, versions))
        while len(tokens) < 50:
            await asyncio.wait((stream,), timeout=0.01)
        await post(cell, "pause_generation", {"mode": "in_place"})
        await send(sender, cell, f"--how disk --folder {tmp_path} --keep-cache --version 7")
        await post(cell, "continue_generation", {})
        await stream
    assert (await cell.host.status()).weights == wire.Weights("ready", 7), "continue_generation ended the update"
    assert len(tokens) == TOKENS
    assert versions == sorted(versions) and set(versions) == {0, 7}
    old = versions.count(0)
    assert tokens[:old] == cell.undisturbed[0][:old] and tokens != cell.undisturbed[0]


async def test_weights_come_from_disk_from_tensors_and_from_a_process_group(cell: Cell, tmp_path: Path) -> None:
    async with trainer() as sender:
        assert "took_s" in await send(sender, cell, "--how tensor --bucket-mb 0 --seed 6 --version 8")
        of_6 = await all_tokens(cell, 8)
        await send(sender, cell, f"--how save --seed 5 --folder {tmp_path}")
        assert "took_s" in await send(sender, cell, f"--how disk --folder {tmp_path} --keep-cache --version 9")
        of_5 = await all_tokens(cell, 9)
        assert (await cell.host.status()).weights == wire.Weights("writing", 9, cell.main.incarnation)
        await post(cell, "flush_cache", {})
        assert (await cell.host.status()).weights == wire.Weights("ready", 9)
        assert "took_s" in await send(sender, cell, "--how distributed --seed 6 --version 10")
        assert await all_tokens(cell, 10) == of_6
        refused = await send(sender, cell, f"--how disk --folder {tmp_path / 'nothing'} --version 11")
        assert "Failed to get" in refused["refused"]
        assert await all_tokens(cell, 10) == of_6 != of_5


async def test_updated_weights_are_the_shadows_at_once(cell: Cell) -> None:
    cell.host.adopt, cell.host.early = True, False
    if not cell.shadows:
        cell.shadows.append(await cell.host.start("shadow3", "shadow"))
    async with trainer() as sender:
        await send(sender, cell, "--how tensor --seed 9 --version 12")
        undisturbed = await all_tokens(cell, 12)
        tokens, _ = await run_through_a_failure(cell, "w", signal.SIGKILL)
    assert cell.host.facts[cell.main.incarnation]["adopted_requests"] == len(PROMPTS)
    assert tokens == undisturbed
    assert await all_tokens(cell, 12) == undisturbed


async def test_half_an_update_is_torn_and_never_served(cell: Cell) -> None:
    watching = asyncio.Event()
    events = cell.host.events(watching)
    first_event = asyncio.ensure_future(anext(events))
    await watching.wait()
    async with trainer() as sender:
        await send(sender, cell, "--how tensor --bucket-mb 0 --only-buckets 3 --seed 6 --version 13")
    versions: list[int] = []
    await tokens_and_versions(cell, PROMPTS[0], [], versions)
    assert set(versions) == {13}, "used, and half of it all the same"
    status = await cell.host.status()
    assert status.weights == wire.Weights("writing", 13, cell.main.incarnation)
    os.kill(next(engine.pid for engine in status.engines if engine.holds_arena), signal.SIGKILL)
    kinds = [(await within(first_event)).kind]
    while kinds[-1] != "dead":
        kinds.append((await within(anext(events))).kind)
    await events.aclose()
    assert (await cell.host.status()).weights == wire.Weights("torn", 13, cell.main.incarnation)
    client, _ = MemoryClient.connect(cell.folder / "memory.sock", "standby", "shadow")
    with client, pytest.raises(TornWeightsError, match=r"the weights are torn: .* began version 13"):
        client.ask(wire.OpenWeights({}, 1), wire.WeightsLent)
    cell.main = await cell.host.start("anew", "main")
    assert (await cell.host.status()).weights == wire.Weights("ready", 0)
    assert await all_tokens(cell, 0) == cell.undisturbed
