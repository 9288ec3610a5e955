"""The gateway before real SGLang on the CPU in fp32: its scheduler is killed in mid-stream, no caller sees it.

Needs SGLang as tests/gpu/test_sglang_handover.py does; one main and one shadow.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest

from belayer import ids
from belayer.actors.worker_recovery import look
from belayer.gpu.gateway.server import serving
from belayer.gpu.gateway.settings import Settings
from belayer.gpu.protocol import EngineProcess
from belayer.gpu.sglang_host import SglangHost
from belayer.journal.events import HandoverCompleted, WorkerReady, WorkerRegistered
from belayer.journal.memory_store import MemoryStore
from belayer.journal.writer import take_over
from benchmarks.sglang_shapes import write_model, write_plugins
from tests.gpu.gateway_site import Client, Stream
from tests.gpu.sglang_cell import ARGUMENTS, PYTHON, ROOT, start_memory
from tests.waiting import DEADLINE_S

TOKENS = 700
PROMPTS = [[3 + (7 * n + k) % 500 for k in range(40 + 11 * n)] for n in range(3)]

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not PYTHON, reason="SGLang is not installed; run scripts/sglang_cpu.sh"),
]


class Engines:
    """A main and its shadow, and what the journal says of them."""

    def __init__(self, host: SglangHost, store: MemoryStore, main: EngineProcess, shadow: EngineProcess) -> None:
        self.host, self.store, self.main, self.shadow = host, store, main, shadow

    async def register(self) -> None:
        writer, _ = await take_over(self.store, ids.worker("w"), "test")
        roles: tuple[tuple[EngineProcess, Literal["main", "shadow"]], ...] = (
            (self.main, "main"),
            (self.shadow, "shadow"),
        )
        for at, role in roles:
            engine = WorkerRegistered(at.incarnation, role, at.host, at.pid, at.pid_start_ticks, at.address, "run")
            await writer.append(engine, WorkerReady(at.incarnation, 0))

    async def hand_over(self, *seen: str) -> None:
        """As recovery does it, but without a new shadow."""
        assert seen[1] == self.main.incarnation
        await self.host.kill(self.main)
        await self.host.promote(self.shadow)
        writer, _ = await take_over(self.store, ids.worker("w"), "test")
        new = self.shadow.incarnation
        await writer.append(HandoverCompleted(self.main.incarnation, new, 0.1), WorkerReady(new, 0))


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[Engines]:
    memory = start_memory(tmp_path / "memory.sock")
    host = SglangHost(
        tmp_path / "memory.sock",
        ["--model-path", str(write_model(tmp_path / "model", "tiny")), *ARGUMENTS.split()],
        tmp_path / "logs",
        owner_pid=os.getpid(),
        python=PYTHON,
        environment={
            "PYTHONPATH": os.pathsep.join([str(write_plugins(tmp_path / "plugins")), str(ROOT)]),
            "BELAYER_BENCH_WEIGHTS": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )
    main = await host.start("main", "main")
    shadow = await host.start("shadow", "shadow")
    made = Engines(host, MemoryStore(), main, shadow)
    await made.register()
    yield made
    for engine in (main, shadow):
        await host.kill(engine)
    memory.terminate()
    memory.wait(DEADLINE_S)


async def test_a_killed_sglang_is_not_seen_by_the_callers_of_the_gateway(engines: Engines) -> None:
    settings = Settings(adopts_kv=True, handover_wait_s=60)
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(
            serving(engines.store, ["w"], engines.hand_over, settings, None, "127.0.0.1", 0)
        )
        client = Client(served.address, await stack.enter_async_context(aiohttp.ClientSession()))
        undisturbed = [await _read(client, n, "u", None) for n in range(len(PROMPTS))]
        assert [stream.info["resumes"] for stream in undisturbed] == [0] * len(PROMPTS)
        far = [asyncio.Event() for _ in PROMPTS]
        reading = [asyncio.create_task(_read(client, n, "k", far[n])) for n in range(len(PROMPTS))]
        await asyncio.gather(*(event.wait() for event in far))
        status = await engines.host.status()
        os.kill(next(engine.pid for engine in status.engines if engine.holds_arena), signal.SIGKILL)
        killed = await asyncio.gather(*reading)
    assert [stream.info["resumes"] for stream in killed] == [1] * len(PROMPTS)
    assert (await look(engines.store, "w")).main == "shadow"
    for before, after in zip(undisturbed, killed, strict=True):
        assert after.tokens == before.tokens and len(after.logprobs) == len(after.tokens) == TOKENS
        assert after.logprobs == pytest.approx(before.logprobs, abs=1e-4)
        assert after.finish == before.finish == {"type": "length", "length": TOKENS}
        assert after.info["completion_tokens"] == TOKENS


async def _read(client: Client, number: int, tag: str, far: asyncio.Event | None) -> Stream:
    """A whole stream; `far` is set when a few tokens are here."""
    sampling: dict[str, Any] = {"max_new_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": PROMPTS[number], "sampling_params": sampling, "return_logprob": True}
    async with client.stream(**body, rid=f"{tag}{number}") as stream:
        await stream.read(20)
        if far is not None:
            far.set()
        return await stream.read()
