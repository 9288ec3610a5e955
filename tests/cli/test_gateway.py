"""`belayer gateway` as a process: killed, its successor goes on; asked to stop, it lets streams finish."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest

from belayer.journal.redis_store import RedisStore
from belayer.processes import start_ticks, wait_exit
from tests.cli.command import COMMAND, assert_one_line_error, belayer, environment
from tests.gpu.gateway_site import LOGPROBS, PROMPT, TURN, Client, Site, site
from tests.waiting import DEADLINE_S, within

WHOLE = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1000}, "return_logprob": True}


def _spawned(command: list[str], settings: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=settings)


@asynccontextmanager
async def started(url: str, namespace: str, *arguments: str) -> AsyncIterator[tuple[Client, subprocess.Popen[str]]]:
    """The command as a person starts it; killed at the end if it is still there."""
    command = [*COMMAND, "gateway", "--worker", "w", *arguments]
    settings = environment(BELAYER_JOURNAL_URL=url, BELAYER_NAMESPACE=namespace, BELAYER_GATEWAY_MAX_STREAMS="100")
    with _spawned(command, settings) as process:
        try:
            assert process.stdout is not None
            said = await within(asyncio.to_thread(process.stdout.readline))
            assert said.startswith("ready http://")
            async with aiohttp.ClientSession() as session:
                yield Client(said.split()[1], session), process
        finally:
            process.kill()


@pytest.fixture
async def slow(tmp_path: Path, redis_store: RedisStore) -> AsyncIterator[Site]:
    async with site(tmp_path, redis_store, tokens_per_s=300) as made:
        await made.worker()
        yield made


async def test_a_killed_gateways_successor_goes_on_where_the_caller_is(
    slow: Site, redis_url: str, namespace: str
) -> None:
    slow.hold(150)
    async with AsyncExitStack() as stack:
        first, process = await stack.enter_async_context(started(redis_url, namespace))
        second, _ = await stack.enter_async_context(started(redis_url, namespace))
        async with first.stream(**WHOLE, rid="a") as stream:
            await stream.read(40)
            process.kill()
            with suppress(aiohttp.ClientError):
                await stream.read()
        assert 40 <= len(stream.tokens) <= 150 and stream.finish is None
        slow.release()
        async with second.stream(**WHOLE, rid="a", headers={"X-Belayer-Offset": str(stream.offset)}) as rest:
            await rest.read()
        assert stream.tokens + rest.tokens == TURN and stream.logprobs + rest.logprobs == LOGPROBS
        assert rest.info["completion_tokens"] == len(TURN) and rest.info["prompt_tokens"] == len(PROMPT)
        assert rest.finish == {"type": "stop", "matched": TURN[-1]}
        changed = {**WHOLE, "sampling_params": {"max_new_tokens": 1000, "temperature": 0.5}}
        assert (await second.ask(**changed, rid="a")).error.startswith("rid_reused")
    assert await slow.findings() == []


async def test_a_gateway_that_is_told_to_stop_lets_streams_finish(slow: Site, redis_url: str, namespace: str) -> None:
    slow.hold(150)
    async with started(redis_url, namespace) as (client, process), client.stream(**WHOLE, rid="a") as stream:
        await stream.read(10)
        process.send_signal(signal.SIGTERM)
        refused = None
        while refused is None:
            with suppress(aiohttp.ClientConnectorError):
                answer = await client.get("/health")
                refused = answer if answer.body["status"] == "draining" else None
        assert refused.status == 503 and (await client.ask(**WHOLE, rid="b")).error.startswith("draining")
        slow.release()
        await stream.read()
        assert stream.tokens == TURN and stream.done
        await within(wait_exit(process.pid, start_ticks(process.pid)))
        assert process.wait(DEADLINE_S) == 0


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    assert_one_line_error(belayer("gateway", "--worker", "w", cwd=tmp_path), "no journal is named", "--url")
    assert_one_line_error(belayer("gateway", cwd=tmp_path), "--worker")
    nowhere = belayer("gateway", "--worker", "w", "--tokenizer", str(tmp_path), cwd=tmp_path)
    assert_one_line_error(nowhere, "tokenizer.json", "--tokenizer names a folder")
    strange = belayer("gateway", "--worker", "w", "--on-disconnect", "shrug", cwd=tmp_path)
    assert_one_line_error(strange, "shrug")
    many = belayer("gateway", "--worker", "w", "--max-streams", "100000000", cwd=tmp_path)
    assert_one_line_error(many, "ulimit -n", "--max-streams 100000000 needs 200000200 open files")
    help_text = belayer("gateway", "--help").stdout
    assert "Examples:" in help_text and "X-Belayer-Offset" in help_text


def test_a_port_that_is_taken_is_named(redis_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = belayer("gateway", "--worker", "w", "--port", port, BELAYER_JOURNAL_URL=redis_url)
    assert_one_line_error(done, f"port {port}")
