"""Where the gateway sends requests: to the same engine while it serves, and never to one that must not."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from belayer import ids
from belayer.actors.reports import report_engine_failure
from belayer.actors.worker_recovery import look
from belayer.journal.events import GenerationResumed, GenerationStarted, WeightsPublished, WorkerDraining, WorkerReady
from belayer.journal.writer import take_over
from belayer.weights import publish_weights
from tests.gpu.gateway_site import PROMPT, TURN, Site, site
from tests.waiting import until

WHOLE = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1000}}


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Site]:
    """Two workers without shadows."""
    async with site(tmp_path, tokens_per_s=1000) as made:
        await asyncio.gather(made.worker("w1"), made.worker("w2"))
        yield made


async def served_by(made: Site, trajectory: str) -> list[str]:
    """The workers that the trajectory's generations were begun or resumed on."""
    events = await made.events(trajectory)
    return [event.worker for event in events if isinstance(event, GenerationStarted | GenerationResumed)]


async def serve_version(made: Site, worker: str, version: int) -> None:
    """The worker's main has been given new weights."""
    writer, _ = await take_over(made.store, ids.worker(worker), "trainer")
    await writer.append(WorkerReady((await look(made.store, worker)).main, version))


async def test_a_trajectory_keeps_its_engine_and_many_share_all(two: Site) -> None:
    async with two.gateway("w1 w2") as client:
        names = [f"t{number}" for number in range(12)]
        short = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
        await asyncio.gather(*(client.ask(**short, rid=f"{name}-1", trajectory=name) for name in names))
        await asyncio.gather(*(client.ask(**short, rid=f"{name}-2", trajectory=name) for name in names))
    places = [await served_by(two, name) for name in names]
    assert all(len(place) == 2 and len(set(place)) == 1 for place in places)
    assert {place[0] for place in places} == {"w1", "w2"}


async def test_without_a_shadow_the_stream_goes_on_on_another_worker(two: Site) -> None:
    two.hold(150)
    async with two.gateway("w1 w2") as client, client.stream(**WHOLE, rid="a") as stream:
        await stream.read(20)
        [first] = await served_by(two, "a")
        os.kill(await two.main_pid(first), signal.SIGKILL)
        two.release()
        await stream.read()
    assert stream.tokens == TURN and await served_by(two, "a") == ["w1", "w2"][:: 1 if first == "w1" else -1]


async def test_only_engines_of_the_current_weight_version_are_given_requests(two: Site) -> None:
    async with two.gateway("w1 w2") as client:
        run, _ = await take_over(two.store, ids.run("run"), "trainer")
        await run.append(WeightsPublished(7))
        waiting = asyncio.create_task(client.ask(**WHOLE, rid="a"))
        assert client.served is not None
        workers = client.served.workers
        await until(lambda: workers.weight_version == 7, what="the published version")
        assert (await client.get("/health")).status == 503 and not waiting.done()
        await serve_version(two, "w2", 7)
        assert (await waiting).status == 200
        await asyncio.gather(*(client.ask(**WHOLE, rid=f"b{number}") for number in range(4)))
        health = await client.get("/health")
        assert health.body["engines"]["w1"] is None and health.body["weight_version"] == 7
    assert {place for name in ("a", "b0", "b1", "b2", "b3") for place in await served_by(two, name)} == {"w2"}


async def test_after_a_handover_the_gateway_goes_on_with_the_published_weights(tmp_path: Path) -> None:
    async with site(tmp_path, tokens_per_s=1000) as made:
        await made.worker("w", shadow=True)
        await serve_version(made, "w", 7)
        assert await publish_weights(made.store, "run", 7) == (["w"], [])
        made.hold(150)
        async with made.gateway("w") as client, client.stream(**WHOLE, rid="a") as stream:
            await stream.read(20)
            os.kill(await made.main_pid(), signal.SIGKILL)
            made.release()
            await stream.read()
        assert stream.tokens == TURN


async def test_an_engine_that_is_to_be_replaced_gets_new_requests_only_if_no_other_serves(two: Site) -> None:
    two.hold(150)
    async with two.gateway("w1 w2") as client:
        async with client.stream(**WHOLE, rid="a") as stream:
            await stream.read(20)
            [place] = await served_by(two, "a")
            other = "w2" if place == "w1" else "w1"
            main = (await look(two.store, place)).main
            writer, _ = await take_over(two.store, ids.worker(place), "recovery")
            await writer.append(WorkerDraining(main, "its memory server is gone"))
            served = client.served
            assert served is not None
            await until(lambda: served.workers.states[place].engines[main].draining, what="the news")
            short = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
            await asyncio.gather(*(client.ask(**short, rid=f"b{number}") for number in range(8)))
            assert {at for number in range(8) for at in await served_by(two, f"b{number}")} == {other}
            two.release()
            await stream.read()
        assert stream.tokens == TURN and await served_by(two, "a") == [place], "it stays where it is"
        await report_engine_failure(two.store, other, (await look(two.store, other)).main, "hung", "silent", "test")
        await until(lambda: served.workers.states[other].serving is None, what="the news")
        assert (await client.ask(**short, rid="c")).status == 200 and await served_by(two, "c") == [place]


async def test_a_running_request_stays_when_new_weights_come_and_says_which_it_had(two: Site) -> None:
    two.hold(150)
    async with two.gateway("w1 w2") as client, client.stream(**WHOLE, rid="a") as stream:
        await stream.read(20)
        await serve_version(two, "w1", 3)
        await serve_version(two, "w2", 3)
        two.release()
        await stream.read()
    assert stream.tokens == TURN and len(await served_by(two, "a")) == 1
    assert stream.info["weight_version"] == "0"


async def test_no_engine_in_time_is_503_and_the_same_request_goes_on_later(two: Site) -> None:
    async with two.gateway("w1", engine_wait_s=0.05) as client:
        engine = (await look(two.store, "w1")).main
        await report_engine_failure(two.store, "w1", engine, "hung", "no step for 3 s", "test")
        refused = await client.ask(**WHOLE, rid="a")
        assert refused.status == 503 and "Retry-After" in refused.headers
        assert "no engine of w1" in refused.error and "may be made again" in refused.error
    await two.recovery.recover("w1")
    async with two.gateway("w1") as client:
        assert (await client.ask(**WHOLE, rid="a")).body["output_ids"] == TURN


async def test_an_engine_that_only_breaks_a_stream_is_not_reported(two: Site) -> None:
    """The process is there and listens: a report would have it killed with all its other streams."""
    async with two.gateway("w1 w2", silence_s=0.3) as client:
        stopped = await two.main_pid("w1")
        os.kill(stopped, signal.SIGSTOP)
        try:
            answers = await asyncio.gather(*(client.ask(**WHOLE, rid=f"a{number}") for number in range(6)))
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert [answer.body["output_ids"] for answer in answers] == [TURN] * 6
    places = [await served_by(two, f"a{number}") for number in range(6)]
    for answer, place in zip(answers, places, strict=True):
        if place == ["w1", "w2"]:  # on a busy machine the other one may have been silent, too
            assert answer.body["meta_info"]["resumes"] == 0, "it gave none of them a token"
    assert two.reports == [] and ["w1", "w2"] in [sorted(set(place)) for place in places]
