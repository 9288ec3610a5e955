"""The recorded engine as a real process, through its host and the HTTP client."""

import asyncio
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from belayer.errors import EngineFailedError, PrefixRefusedError
from belayer.gpu.gateway.engines import Engines
from belayer.gpu.gateway.workers import Route
from belayer.gpu.protocol import EngineProcess, Sampling, TokenBatch
from belayer.gpu.recorded_host import RecordedEngineHost
from belayer.gpu.recorded_prefix import ASSISTANT, END, TOOL, USER, TokenRecording, logprob
from belayer.journal.events import WorkerRegistered
from belayer.processes import is_alive, start_ticks
from belayer.projections.worker import EngineState
from tests.waiting import DEADLINE_S, within

PROMPT = [USER, 1, 2, END, ASSISTANT]
RECORDING = TokenRecording("long", PROMPT, [[*range(272, 472), END], [3, END]])
OBSERVED = [TOOL, 9, END, ASSISTANT]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "long.recording.json").write_bytes(msgspec.json.encode(RECORDING))
    return tmp_path


@pytest.fixture
async def host(folder: Path) -> AsyncIterator[RecordedEngineHost]:
    yield RecordedEngineHost(folder, folder / "engines", owner_pid=os.getpid(), tokens_per_s=4000, silence_s=DEADLINE_S)


async def _collect(
    host: RecordedEngineHost, engine: EngineProcess, prefix: list[int], max_new_tokens: int = 4096
) -> list[TokenBatch]:
    client = host.connect(engine)
    try:
        return [batch async for batch in client.generate("r1", prefix, Sampling(max_new_tokens))]
    finally:
        await client.close()


def _tokens(batches: list[TokenBatch]) -> list[int]:
    return [token for batch in batches for token in batch.token_ids]


def _logprobs(batches: list[TokenBatch]) -> list[float]:
    return [value for batch in batches for value in batch.logprobs]


async def test_a_generation_cut_anywhere_goes_on_to_the_same_tokens_and_logprobs(host: RecordedEngineHost) -> None:
    engine = await host.start("main-1", "main")
    try:
        whole = await _collect(host, engine, PROMPT)
        assert _tokens(whole) == RECORDING.turns[0]
        assert whole[-1].finish_reason == "stop"
        assert [batch.finish_reason for batch in whole[:-1]] == [None] * (len(whole) - 1)
        assert _logprobs(whole) == [logprob("long", 0, at, token) for at, token in enumerate(RECORDING.turns[0])]
        for cut in (1, 77, 200):
            rest = await _collect(host, engine, PROMPT + RECORDING.turns[0][:cut])
            assert _tokens(rest) == RECORDING.turns[0][cut:]
            assert _logprobs(rest) == _logprobs(whole)[cut:]
        second = await _collect(host, engine, PROMPT + RECORDING.turns[0] + OBSERVED)
        assert _tokens(second) == [3, END]
        limited = await _collect(host, engine, PROMPT, max_new_tokens=10)
        assert _tokens(limited) == RECORDING.turns[0][:10] and limited[-1].finish_reason == "length"
    finally:
        await host.kill(engine)


async def test_a_wrong_prefix_is_refused_with_its_offset(host: RecordedEngineHost) -> None:
    engine = await host.start("main-1", "main")
    try:
        with pytest.raises(PrefixRefusedError) as raised:
            await _collect(host, engine, [*PROMPT, 272, 273, 999])
        assert raised.value.offset == len(PROMPT) + 2
    finally:
        await host.kill(engine)


async def test_sigkill_in_mid_generation_is_an_engine_failure_and_the_shadow_goes_on(folder: Path) -> None:
    (hold := folder / "hold").write_text("100")
    host = RecordedEngineHost(folder, folder / "engines", owner_pid=os.getpid(), silence_s=DEADLINE_S, hold=hold)
    main, shadow = await asyncio.gather(host.start("main-1", "main"), host.start("shadow-1", "shadow"))
    assert {main.pid_start_ticks, shadow.pid_start_ticks}.isdisjoint({0})
    client = host.connect(main)
    received: list[TokenBatch] = []
    try:
        with pytest.raises(EngineFailedError, match="stream broke after"):
            async with aclosing(client.generate("r1", PROMPT, Sampling())) as batches:
                async for batch in batches:
                    received.append(batch)
                    os.kill(main.pid, signal.SIGKILL)
        hold.unlink()
        with pytest.raises(EngineFailedError, match="503"):
            await _collect(host, shadow, PROMPT)
        with pytest.raises(EngineFailedError):
            await _collect(host, main, PROMPT)
        await host.kill(main)
        assert not is_alive(main.pid, main.pid_start_ticks)
        await host.promote(shadow)
        await host.promote(shadow)
        got = _tokens(received)
        rest = await _collect(host, shadow, PROMPT + got, max_new_tokens=20)
        assert got + _tokens(rest) == RECORDING.turns[0][: len(got) + 20]
    finally:
        await client.close()
        await host.kill(main)
        await host.kill(shadow)


async def test_another_incarnation_at_the_address_is_not_taken_for_the_one_meant(host: RecordedEngineHost) -> None:
    engine = await host.start("main-2", "main")
    old = EngineProcess("main-1", engine.host, engine.pid, engine.pid_start_ticks, engine.address)
    try:
        with pytest.raises(EngineFailedError, match="this is main-2"):
            await _collect(host, old, PROMPT)
        with pytest.raises(EngineFailedError, match="main-2 answers"):
            await host.promote(old)
    finally:
        await host.kill(engine)


async def test_a_gateway_takes_an_engine_whose_port_another_one_has_for_dead(host: RecordedEngineHost) -> None:
    """The engine is on another machine, so its process cannot be looked at; its port has come again."""
    reports: list[tuple[str, str, str, str]] = []

    async def report(*said: str) -> None:
        reports.append((said[0], said[1], said[2], said[3]))

    engine = await host.start("w-2", "main")
    engines = Engines(report, 5.0)
    try:
        for incarnation, until_s in (("w-1", math.inf), ("w-2", None)):
            at = WorkerRegistered(incarnation, "main", "elsewhere", 1, 1, engine.address, "run")
            avoid_until_s = await engines.failed(Route("w", EngineState(at)), "its stream broke")
            assert avoid_until_s == until_s or (until_s is None and avoid_until_s < math.inf)
        assert reports == [("w", "w-1", "unreachable", "its stream broke")]
    finally:
        await engines.close()
        await host.kill(engine)


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait(timeout=DEADLINE_S)


async def test_an_engine_ends_with_its_owner(folder: Path, owner: subprocess.Popen[bytes]) -> None:
    host = RecordedEngineHost(folder, folder / "engines", owner_pid=owner.pid)
    engine = await host.start("main-1", "main")
    pidfd = os.pidfd_open(engine.pid)
    try:
        owner.kill()
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        loop.add_reader(pidfd, lambda: ended.done() or ended.set_result(True))
        assert await within(ended)
        loop.remove_reader(pidfd)
        assert start_ticks(engine.pid) == 0
    finally:
        os.close(pidfd)
        await host.kill(engine)


async def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    host = RecordedEngineHost(tmp_path / "none", tmp_path, owner_pid=os.getpid())
    with pytest.raises(EngineFailedError, match="no file"):
        await host.start("main-1", "main")


def test_bad_options_are_one_line_and_exit_code_2(folder: Path) -> None:
    command = [sys.executable, "-m", "belayer.gpu.recorded_engine", "--recordings", str(folder)]
    command += ["--owner-pid", str(os.getpid())]
    with subprocess.Popen([*command], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        port = msgspec.json.decode(other.stdout.readline())["address"].rpartition(":")[2]
        taken = subprocess.run(
            [*command, "--port", port], capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        other.kill()
    assert taken.returncode == 2
    assert f"port {port}" in taken.stderr and taken.stderr.count("\n") == 1
    slow = subprocess.run(
        [*command, "--tokens-per-s", "0"], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert slow.returncode == 2 and "above 0" in slow.stderr
