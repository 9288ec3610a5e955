"""Copies of one checkpoint: equal at first, then each on its own; all of them or none."""

from __future__ import annotations

import asyncio

import pytest

from belayer.errors import RestoreFailedError
from belayer.sandbox.fork import fork
from tests.sandbox.conftest import SPEC, Bench, Live
from tests.waiting import until

pytestmark = pytest.mark.sandbox

COUNTER = """
mkfifo q; (n=0; while :; do read -r by < q || continue; n=$((n + by)); echo $n > n.new; mv n.new n; done) & true
"""
COUNT = "rm -f n; echo {by} > q; until [ -s n ]; do sleep 0.01; done; cat n"


async def forked(bench: Bench, live: Live, checkpoint: str) -> list[Live]:
    copies = {f"{bench.run}-t{n}": bench.name() for n in range(3)}
    made = await fork(bench.host, bench.run, checkpoint, live.number, SPEC, copies)
    assert {trajectory: here.name for trajectory, here in made.items()} == copies
    return [Live(bench, await bench.host.attach(here), live.number) for here in made.values()]


async def test_files_diverge(bench: Bench) -> None:
    live = await bench.create()
    await live.sh("echo common > file; rm /etc/debian_version")
    checkpoint = await live.checkpoint()
    copies = await forked(bench, live, checkpoint)
    await asyncio.gather(*(copy.sh(f"echo {n} >> file; mkdir dir-{n}") for n, copy in enumerate(copies)))
    for n, copy in enumerate(copies):
        assert await copy.sh("cat file; ls; ls /etc/debian_version 2>&1 | wc -l") == f"common\n{n}\ndir-{n}\nfile\n1\n"
    assert await live.sh("cat file") == "common\n"
    drawn = {await copy.sh("head -c 8 /dev/urandom | md5sum") for copy in copies}
    assert len(drawn) == 3, "the kernel's randomness is not copied"


async def test_processes_diverge(bench: Bench) -> None:
    live = await bench.create()
    await live.sh(COUNTER)
    assert await live.sh(COUNT.format(by=5)) == "5\n"
    copies = await forked(bench, live, await live.checkpoint())
    for n, copy in enumerate(copies):
        assert await copy.sh(COUNT.format(by=10**n)) == f"{5 + 10**n}\n"
    assert await live.sh(COUNT.format(by=1)) == "6\n"
    assert await copies[0].sh(COUNT.format(by=1)) == "7\n"


async def test_a_copy_of_a_copy(bench: Bench) -> None:
    live = await bench.create()
    await live.sh(COUNTER)
    await live.sh(COUNT.format(by=1))
    copy = (await forked(bench, live, await live.checkpoint()))[1]
    assert await copy.sh(COUNT.format(by=1)) == "2\n"
    again = await forked(bench, copy, await copy.checkpoint())
    assert [await each.sh(COUNT.format(by=1)) for each in again] == ["3\n"] * 3


async def test_all_or_none(bench: Bench) -> None:
    live = await bench.create()
    await live.sh("echo here > file")
    checkpoint = await live.checkpoint()
    before = await bench.host.incarnations(bench.run)
    with pytest.raises(RestoreFailedError, match="holds action 1, not 0"):
        await fork(bench.host, bench.run, checkpoint, 0, SPEC, {"a": bench.name(), "b": bench.name()})
    copies = {f"t{n}": bench.name() for n in range(3)}
    begun = asyncio.create_task(fork(bench.host, bench.run, checkpoint, 1, SPEC, copies))
    await until(lambda: is_more(bench, before), what="a copy in the making")
    begun.cancel()
    with pytest.raises(asyncio.CancelledError):
        await begun
    assert await bench.host.incarnations(bench.run) == before


async def test_a_checkpoint_that_is_removed_meanwhile_lasts_for_all_copies(bench: Bench) -> None:
    live = await bench.create()
    await live.sh("head -c 50000 /dev/urandom > file")
    expected = await live.sh("md5sum file")
    checkpoint = await live.checkpoint()
    before = await bench.host.incarnations(bench.run)
    making = asyncio.create_task(forked(bench, live, checkpoint))
    await until(lambda: is_more(bench, before), what="a copy in the making")
    await bench.host.remove_checkpoint(checkpoint)
    assert checkpoint not in await bench.host.checkpoints()
    assert [await copy.sh("md5sum file") for copy in await making] == [expected] * 3
    assert not bench.host.checkpoint_path(checkpoint).exists()


async def is_more(bench: Bench, before: list[str]) -> bool:
    return await bench.host.incarnations(bench.run) != before
