"""A capture that holds its container from the start: an action that comes meanwhile waits, and is not in it."""

from __future__ import annotations

import asyncio

import pytest

from belayer.sandbox.freezer import freezer_of
from tests.sandbox.conftest import Bench
from tests.waiting import until


@pytest.mark.parametrize("kind", ["quiet", "with a process"])
async def test_an_action_that_comes_meanwhile_waits(bench: Bench, kind: str) -> None:
    live = await bench.create()
    await live.sh("for i in $(seq 500); do head -c 4096 /dev/urandom > f$i; done")
    if kind != "quiet":
        await live.sh("sleep 1000 > /dev/null 2>&1 &")
    freezer = freezer_of(live.incarnation.pid)
    assert freezer is not None
    name, number = bench.name(), live.number
    capturing = asyncio.create_task(bench.host.checkpoint(live.incarnation, name, number, hold=True))
    await until(lambda: freezer.freezing or capturing.done())
    acting = asyncio.create_task(live.sh("echo later > later; ls | wc -l"))
    report = await capturing
    assert (await acting).strip() == "501"
    assert 0.0 < report.frozen_s <= report.total_s and report.held_by == ""
    assert not freezer.freezing
    back = await live.kill_and_restore(name, number)
    assert await back.sh("ls | wc -l") == "500\n"


async def test_nothing_new_is_seen_while_it_is_held(bench: Bench) -> None:
    live = await bench.create()
    await live.sh("echo > file")
    await live.checkpoint()
    await live.sh("sleep 0.05")
    first = await live.checkpoint()
    await live.sh("cat file")
    report = await bench.host.checkpoint(live.incarnation, bench.name(), live.number, first, hold=True)
    assert report.held_by == first
    assert await live.sh("echo on") == "on\n"
