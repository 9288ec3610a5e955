"""A worker with a real SGLang on the CPU under the actors: each kind of failure is seen, told apart and overcome.

`make test` brings SGLang; without it these tests are skipped. One worker serves all of them, in order: each test takes
the main and the shadow that the one before left, and the actors have armed a new shadow in between.
"""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from belayer import ids
from belayer.actors.actor import Actor, run_actor
from belayer.actors.detector import Detector
from belayer.actors.recovery import Recovery
from belayer.actors.sandbox_recovery import SandboxRecovery
from belayer.actors.worker_recovery import WorkerRecovery, look, process_of
from belayer.errors import EngineFailedError
from belayer.gpu import sglang_cpu
from belayer.gpu.memory_process import MemoryProcess
from belayer.gpu.protocol import Sampling
from belayer.gpu.sglang_host import SglangHost
from belayer.journal.codec import Recorded
from belayer.journal.events import FailureDetected, HandoverCompleted, RecoveryStarted
from belayer.journal.memory_store import MemoryStore
from belayer.journal.writer import Reader
from belayer.processes import host_name
from belayer.projections.worker import WorkerState
from tests.actors.model import ModelHost
from tests.command_lines import command_lines
from tests.gpu.sglang_faults import PREFILL_S, write_plugin
from tests.waiting import until, within

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 400
PROMPTS = [[3 + (7 * n + k) % 500 for k in range(40 + 11 * n)] for n in range(3)]
START_S = 600.0
"""Three engines start on two cores in half a minute; a loaded machine takes longer."""

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sglang_cpu.find_python() is None, reason="SGLang is not installed; run scripts/sglang_cpu.sh"),
]


@dataclass
class Cell:
    """A worker under its actors. `seconds`: how long each failure took to be detected."""

    store: MemoryStore
    host: SglangHost
    memory: MemoryProcess
    faults: Path
    undisturbed: list[list[int]] = field(default_factory=list)

    async def state(self) -> WorkerState:
        return await look(self.store, "w")

    async def ready(self) -> WorkerState:
        """The worker once it has a main and an armed shadow."""

        async def whole() -> WorkerState | None:
            state = await self.state()
            return state if state.serving is not None and state.shadow is not None else None

        state = await until(whole, START_S, "a main and a shadow")
        assert state is not None
        return state

    async def event(self, kind: type, incarnation: str) -> Recorded:
        """The worker's event of that kind about that incarnation, as soon as it is in the journal."""

        async def there() -> Recorded | None:
            for recorded in await Reader(self.store, ids.worker("w")).catch_up():
                event = recorded.event
                if isinstance(event, kind):
                    about = getattr(event, "incarnation", "") or getattr(event, "from_incarnation", "")
                    if about == incarnation:
                        return recorded
            return None

        recorded = await until(there, what=f"{kind.__name__} of {incarnation}")
        assert recorded is not None
        return recorded

    async def ask(self, name: str, prompt: list[int], tokens: list[int]) -> None:
        """Stream a request from whatever serves, across failures, until it has all its tokens."""
        while len(tokens) < TOKENS:

            async def serving() -> WorkerState | None:
                state = await self.state()
                return state if state.serving is not None else None

            state = await until(serving, START_S, "a main")
            assert state is not None and state.serving is not None
            client = self.host.connect(process_of(state.serving))
            sampling = Sampling(max_new_tokens=TOKENS - len(tokens))
            try:
                async for batch in client.generate(f"{name}-{len(tokens)}", prompt + tokens, sampling):
                    tokens += batch.token_ids
            except EngineFailedError:
                continue
            finally:
                await client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cell(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cell]:
    folder = tmp_path_factory.mktemp("worker")
    (faults := folder / "faults").mkdir()
    python = str(sglang_cpu.need_python())
    memory = MemoryProcess("cpu", folder / "memory.sock", os.getpid(), log=folder / "memory.log")
    host = SglangHost(
        None,
        sglang_cpu.arguments(
            sglang_cpu.write_model(folder / "model", vocabulary=512, context=4096), tokens=8192, requests=8
        ),
        folder / "logs",
        owner_pid=os.getpid(),
        python=python,
        environment={
            **sglang_cpu.ENVIRONMENT,
            "BELAYER_TEST_FAULTS": str(faults),
            "PYTHONPATH": write_plugin(folder / "plugins", ROOT),
        },
        memory=memory,
    )
    store = MemoryStore()
    made = Cell(store, host, memory, faults)
    workers = WorkerRecovery(store, host, host_name(), "test", patience_s=START_S)
    actors: list[Actor] = [
        Detector(store, host, host_name(), "detector"),
        Recovery(SandboxRecovery(store, ModelHost(), host_name(), "recovery"), workers),
    ]
    running = [asyncio.create_task(run_actor(store, actor, host_name(), "c1")) for actor in actors]
    try:
        await workers.start("w", "run")
        await made.ready()
        made.undisturbed = [[] for _ in PROMPTS]
        await asyncio.gather(*(made.ask(f"u{n}", PROMPTS[n], made.undisturbed[n]) for n in range(len(PROMPTS))))
        yield made
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for engine in (await made.state()).engines.values():
            await host.kill(process_of(engine))


async def fail_in_mid_stream(cell: Cell, tag: str, strike: str | signal.Signals) -> FailureDetected:
    """Strike the main while it streams; all streams end with the undisturbed tokens. What was detected."""
    state = await cell.ready()
    assert state.serving is not None and state.shadow is not None
    parts: list[list[int]] = [[] for _ in PROMPTS]
    streams = [asyncio.create_task(cell.ask(f"{tag}{n}", PROMPTS[n], parts[n])) for n in range(len(PROMPTS))]
    await until(lambda: all(len(part) > 20 for part in parts), what="some tokens of each stream")
    if isinstance(strike, str):
        (cell.faults / strike).touch()
        await until(lambda: not (cell.faults / strike).exists(), what="the step that fails")
    else:
        status = await cell.host.status()
        os.kill(next(engine.pid for engine in status.engines if engine.holds_arena), strike)
    assert any(len(part) < TOKENS for part in parts), "the failure came too late to break a stream"
    failed = await cell.event(FailureDetected, state.main)
    handover = (await cell.event(HandoverCompleted, state.main)).event
    assert isinstance(failed.event, FailureDetected) and isinstance(handover, HandoverCompleted)
    assert handover.to_incarnation == state.shadow.registered.incarnation
    phases = list(handover.phases_s)
    assert phases[:2] == ["fence", "prove"] and {"map", "adopt"} <= set(phases) and phases[-1] == "serve"
    assert handover.adopted_tokens > 0 and sum(handover.phases_s.values()) <= handover.handover_s + 0.01
    await within(asyncio.gather(*streams))
    assert parts == cell.undisturbed
    return failed.event


@pytest.mark.parametrize(
    ("strike", "said"),
    [
        (signal.SIGKILL, "scheduler thread ended"),
        ("segv", "Fatal Python error: Segmentation fault"),
        ("raise", "ValueError: injected into a step"),
        ("oom", "RuntimeError: "),
    ],
)
async def test_a_crash_is_seen_at_once(cell: Cell, strike: str | signal.Signals, said: str) -> None:
    failed = await fail_in_mid_stream(cell, f"{strike}-", strike)
    assert failed.kind == "died" and said in failed.evidence


@pytest.mark.parametrize("strike", ["deadlock", signal.SIGSTOP])
async def test_a_hang_is_seen_by_its_silence(cell: Cell, strike: str | signal.Signals) -> None:
    failed = await fail_in_mid_stream(cell, f"{strike}-", strike)
    assert failed.kind == "hung" and "was silent for" in failed.evidence


async def test_a_long_prefill_is_no_hang(cell: Cell) -> None:
    """One step of 4 s; with BELAYER_LONG=1 of 60 s."""
    state = await cell.ready()
    (cell.faults / "slow").touch()
    prompt = [5 + k % 400 for k in range(int(PREFILL_S * 60))]  # in chunks of at most 2,048: allowed is more
    began_s = time.monotonic()
    tokens: list[int] = []
    client = cell.host.connect(process_of(state.engines[state.main]))
    async for batch in client.generate("slow", prompt, Sampling(max_new_tokens=5)):
        tokens += batch.token_ids
    await client.close()
    assert time.monotonic() - began_s > PREFILL_S and len(tokens) == 5
    assert (await cell.state()).main == state.main
    assert not (await cell.state()).engines[state.main].evidence


async def test_new_weights_are_known_to_the_journal_and_so_are_the_next_mains(cell: Cell) -> None:
    """An update as a trainer makes it, of no tensor, so that the tokens stay: then its main dies."""

    async def serving_7() -> str:
        serving = (await cell.state()).serving
        return "" if serving is None or serving.weight_version != 7 else serving.registered.incarnation

    state = await cell.ready()
    assert state.serving is not None and state.serving.weight_version == 0
    nothing = base64.b64encode(pickle.dumps([])).decode()
    body = {"serialized_named_tensors": [nothing], "weight_version": "7"}
    url = f"{state.serving.registered.address}/update_weights_from_tensor"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
    assert await until(serving_7, what="the version in the journal") == state.main
    await fail_in_mid_stream(cell, "seven-", signal.SIGKILL)
    assert await until(serving_7, what="the version of the next main") != state.main


async def test_without_its_memory_server_a_main_serves_on_and_is_replaced_when_idle(cell: Cell) -> None:
    state = await cell.ready()
    assert state.shadow is not None
    tokens: list[int] = []
    stream = asyncio.create_task(cell.ask("m", PROMPTS[0], tokens))
    await until(lambda: len(tokens) > 20, what="some tokens")
    before = _server_pid(cell)
    os.kill(before, signal.SIGKILL)
    await cell.event(FailureDetected, state.shadow.registered.incarnation)
    await within(stream)
    assert tokens == cell.undisturbed[0], "the stream was not broken"
    failed = (await cell.event(FailureDetected, state.main)).event
    assert isinstance(failed, FailureDetected) and "replaced while idle" in failed.evidence
    after = await cell.ready()
    assert after.main != state.main and _server_pid(cell) != before
    assert (await cell.host.status()).holder == after.main
    events = [recorded.event for recorded in await Reader(cell.store, ids.worker("w")).catch_up()]
    assert [event.plan for event in events if isinstance(event, RecoveryStarted)][-1] == "start anew"
    again: list[int] = []
    await cell.ask("n", PROMPTS[0], again)
    assert again == cell.undisturbed[0]


def _server_pid(cell: Cell) -> int:
    """The process that listens on the memory server's socket."""
    for pid, words in command_lines():
        if "belayer.gpu.memory_main" in words and str(cell.memory.socket) in words:
            return pid
    raise AssertionError("no memory server runs")
