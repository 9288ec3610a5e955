"""The HTTP client against servers that speak as SGLang does, and against ones that misbehave."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import web

from belayer.errors import EngineFailedError, InputError
from belayer.gpu.http_engine import HttpEngine
from belayer.gpu.protocol import EngineProcess, Sampling, TokenBatch
from belayer.gpu.resume_group import UNREAD_TOKENS, FellBehindError
from tests.waiting import DEADLINE_S, until, within

Say = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


@asynccontextmanager
async def serving(say: Say, seen: list[Any] | None = None, silence_s: float = DEADLINE_S) -> AsyncIterator[HttpEngine]:
    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if seen is not None:
            seen.append(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await say(request, response)
        return response

    app = web.Application()

    async def abort(request: web.Request) -> web.Response:
        assert seen is not None
        seen.append({"abort": (await request.json())["rid"]})
        return web.Response()

    app.router.add_post("/generate", generate)
    app.router.add_post("/abort_request", abort)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    engine = HttpEngine(EngineProcess("e-1", "here", 1, 1, address), silence_s=silence_s)
    try:
        yield engine
    finally:
        await engine.close()
        await runner.cleanup()


def event(ids: list[int], completion: int, finish: Any = None, version: str = "default", name: str = "r") -> bytes:
    """As SGLang 0.5.17's tokenizer manager builds it."""
    logprobs = [[-token / 4, token, None] for token in ids]
    info = {
        "id": name,
        "finish_reason": finish,
        "prompt_tokens": 3,
        "weight_version": version,
        "output_token_logprobs": logprobs,
        "completion_tokens": completion,
        "cached_tokens": 0,
    }
    return b"data: " + json.dumps({"output_ids": ids, "meta_info": info}).encode() + b"\n\n"


async def collect(engine: HttpEngine) -> list[TokenBatch]:
    return [batch async for batch in engine.generate("r", [1, 2, 3], Sampling(9, 0.0, (7,)))]


STOP = {"type": "stop", "matched": 7}
CUMULATIVE = [event([4], 1), event([4, 5, 6], 3), event([4, 5, 6, 7], 4, STOP, "12")]
INCREMENTAL = [event([4], 1), event([5, 6], 3), event([7], 4, STOP, "12")]


@pytest.mark.parametrize("events", [CUMULATIVE, INCREMENTAL])
@pytest.mark.parametrize("cut_at", [1, 7, 10_000])
async def test_both_ways_of_streaming_give_each_token_once(events: list[bytes], cut_at: int) -> None:
    async def say(request: web.Request, response: web.StreamResponse) -> None:
        whole = b"".join(events) + b"data: [DONE]\n\n"
        for start in range(0, len(whole), cut_at):
            await response.write(whole[start : start + cut_at])

    seen: list[Any] = []
    async with serving(say, seen) as engine:
        batches = await collect(engine)
    assert [token for batch in batches for token in batch.token_ids] == [4, 5, 6, 7]
    assert [value for batch in batches for value in batch.logprobs] == [-1.0, -1.25, -1.5, -1.75]
    assert batches[-1].finish_reason == "stop" and batches[-1].weight_version == 12
    assert batches[0].weight_version == 0
    [body] = seen
    assert body["input_ids"] == [1, 2, 3] and body["stream"] and body["return_logprob"]
    assert body["sampling_params"] == {"max_new_tokens": 9, "temperature": 0.0, "stop_token_ids": [7]}


@pytest.mark.parametrize(
    ("parts", "evidence"),
    [
        ([event([4], 1), b"data: [DONE]\n\n"], "after 1 tokens without a finish reason"),
        ([event([4], 1)], "after 1 tokens without a finish reason"),
        ([event([4], 1), b"data: {broken\n\n"], "no event"),
        ([event([4], 3)], "where 3 were new"),
        ([event([4, 5], 2), event([4], 1)], "where -1 were new"),
        ([b'data: {"output_ids": [1]}\n\n'], "without what Belayer needs"),
        ([event([], 0, {"type": "abort", "message": "out of memory"})], "out of memory"),
        ([b'data: {"error": {"message": "boom", "code": 500}}\n\n'], "answered 500: boom"),
    ],
)
async def test_a_stream_that_does_not_finish_is_an_engine_failure(parts: list[bytes], evidence: str) -> None:
    async def say(request: web.Request, response: web.StreamResponse) -> None:
        for part in parts:
            await response.write(part)

    async with serving(say) as engine:
        with pytest.raises(EngineFailedError, match=evidence):
            await collect(engine)


async def test_a_dropped_connection_is_an_engine_failure() -> None:
    async def say(request: web.Request, response: web.StreamResponse) -> None:
        await response.write(event([4], 1))
        assert request.transport is not None
        request.transport.abort()

    async with serving(say) as engine:
        with pytest.raises(EngineFailedError, match="broke"):
            await collect(engine)


async def test_silence_is_an_engine_failure() -> None:
    heard = asyncio.Event()

    async def say(request: web.Request, response: web.StreamResponse) -> None:
        await response.write(event([4], 1))
        await heard.wait()

    async with serving(say, silence_s=0.5) as engine:
        with pytest.raises(EngineFailedError, match=r"after [01] tokens \(nothing came for 0.5 s\)"):
            await within(collect(engine))
        heard.set()


async def test_nothing_at_the_address_is_an_engine_failure() -> None:
    engine = HttpEngine(EngineProcess("e-1", "here", 1, 1, "http://127.0.0.1:1"), silence_s=0.5)
    try:
        with pytest.raises(EngineFailedError, match="after 0 tokens"):
            await collect(engine)
    finally:
        await engine.close()


async def test_a_request_that_sglang_calls_wrong_is_the_callers_fault() -> None:
    async def say(request: web.Request, response: web.StreamResponse) -> None:
        await response.write(b'data: {"error": {"message": "too long", "code": 400}}\n\ndata: [DONE]\n\n')

    async with serving(say) as engine:
        with pytest.raises(InputError, match="too long"):
            await collect(engine)


async def resume(engine: HttpEngine, name: str, most: int = 99) -> list[int]:
    """Tokens of a resumption, left early after `most` tokens."""
    tokens: list[int] = []
    async with aclosing(engine.generate(name, list(range(40)), Sampling(9), resumes=f"old-{name}")) as batches:
        async for batch in batches:
            tokens += batch.token_ids
            if len(tokens) >= most:
                break
    return tokens


async def test_resumptions_of_one_moment_share_a_request_and_each_gets_its_own() -> None:
    async def say(request: web.Request, response: web.StreamResponse) -> None:
        body = await request.json()
        for name in body["rid"]:
            await response.write(event([ord(name)], 1, name=name))
        for name in reversed(body["rid"]):
            await response.write(event([ord(name) + 100], 2, STOP, name=name))
        await response.write(b"data: [DONE]\n\n")

    seen: list[Any] = []
    async with serving(say, seen) as engine:
        assert await asyncio.gather(resume(engine, "a"), resume(engine, "b")) == [[97, 197], [98, 198]]
    assert [body["rid"] for body in seen] == [["a", "b"]]
    assert [params["custom_params"] for params in seen[0]["sampling_params"]] == [
        {"belayer_resume": ["old-a", 40]},
        {"belayer_resume": ["old-b", 40]},
    ]


async def test_who_leaves_a_group_is_aborted_and_the_others_go_on_to_its_break() -> None:
    aborted = asyncio.Event()

    async def say(request: web.Request, response: web.StreamResponse) -> None:
        for name in (await request.json())["rid"]:
            await response.write(event([ord(name)], 1, name=name))
        await within(aborted.wait())
        await response.write(event([198], 2, name="b"))

    seen: list[Any] = []
    async with serving(say, seen) as engine:
        other = asyncio.create_task(resume(engine, "b"))
        assert await resume(engine, "a", most=1) == [97]
        await until(lambda: {"abort": "a"} in seen)
        aborted.set()
        with pytest.raises(EngineFailedError, match="without a finish reason"):
            await other


async def test_an_ended_client_has_no_stream_that_waits_and_takes_no_new_one() -> None:
    """Alone, in a group, in a group that is not sent yet; the engine says nothing, and might for ever."""
    heard = asyncio.Event()

    async def say(request: web.Request, response: web.StreamResponse) -> None:
        names = (await request.json())["rid"]
        for name in names if isinstance(names, list) else [names]:
            await response.write(event([7], 1, name=name))
        await heard.wait()

    async with serving(say, [], silence_s=1000) as engine:
        streams = [engine.generate("r", [1, 2, 3], Sampling(9))]
        streams += [engine.generate(name, list(range(40)), Sampling(9), resumes=f"old-{name}") for name in "ab"]
        for first in await asyncio.gather(*(anext(stream) for stream in streams)):
            assert first.token_ids == [7]
        waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
        waiting.append(asyncio.ensure_future(resume(engine, "gathering")))  # type: ignore[arg-type]
        await asyncio.wait(waiting, timeout=0)
        engine.end("its host is gone")
        for task in waiting:
            with pytest.raises(EngineFailedError, match="its host is gone"):
                await within(task)
        for resumes in ("", "old"):
            with pytest.raises(EngineFailedError, match="its host is gone"):
                await anext(engine.generate("later", list(range(40)), Sampling(9), resumes=resumes))
        heard.set()


async def test_events_without_tokens_are_silence() -> None:
    async def say(request: web.Request, response: web.StreamResponse) -> None:
        name = (await request.json())["rid"]
        with suppress(ConnectionError):
            while True:
                await response.write(event([], 0, name=name))
                await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.05)

    async with serving(say, [], silence_s=0.5) as engine:
        with pytest.raises(EngineFailedError, match=r"after 0 tokens \(nothing came for 0.5 s\)"):
            await within(collect(engine))
        with pytest.raises(EngineFailedError, match=r"after 0 tokens \(nothing came for 0.5 s\)"):
            await within(resume(engine, "a"))


async def test_who_does_not_read_leaves_the_group_and_holds_up_nobody() -> None:
    """The events are cumulative, as SGLang's are by default."""

    async def say(request: web.Request, response: web.StreamResponse) -> None:
        for count in range(1, 61):
            await response.write(event([5] * 128 * count, 128 * count, name="slow"))
            await response.write(event([6] * count, count, STOP if count == 60 else None, name="quick"))

    seen: list[Any] = []
    async with serving(say, seen, silence_s=1000) as engine:
        slow = engine.generate("slow", list(range(40)), Sampling(9), resumes="old-slow")
        quick = asyncio.create_task(resume(engine, "quick"))
        received = len((await anext(slow)).token_ids)
        assert await quick == [6] * 60
        assert {"abort": "slow"} in seen
        with pytest.raises(FellBehindError):
            async for batch in slow:
                received += len(batch.token_ids)
        assert received <= UNREAD_TOKENS + 2 * 128


async def test_what_a_group_is_refused_for_is_found_by_asking_for_each_alone() -> None:
    async def say(request: web.Request, response: web.StreamResponse) -> None:
        body = await request.json()
        if isinstance(body["rid"], list) or body["rid"] == "b~":
            await response.write(b'data: {"error": {"message": "too long", "code": 400}}\n\n')
        else:
            await response.write(event([7], 1, STOP, name=body["rid"]))

    seen: list[Any] = []
    async with serving(say, seen) as engine:
        good, bad = await asyncio.gather(resume(engine, "a"), resume(engine, "b"), return_exceptions=True)
    assert good == [7] and isinstance(bad, InputError)
    assert sorted(str(body["rid"]) for body in seen) == ["['a', 'b']", "a~", "b~"]


async def test_an_event_of_nobody_ends_the_group() -> None:
    async def say(request: web.Request, response: web.StreamResponse) -> None:
        for name in (await request.json())["rid"]:
            await response.write(event([7], 1, name=name))
        await response.write(event([7], 1, name="nobody"))
        await within(request.content.wait_eof())

    async with serving(say, [], silence_s=1000) as engine:
        for error in await asyncio.gather(resume(engine, "a"), resume(engine, "b"), return_exceptions=True):
            assert isinstance(error, EngineFailedError) and "'nobody'" in error.evidence
