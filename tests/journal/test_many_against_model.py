"""A cluster whose slots move, and Sentinel failovers that roll back, against the reference in memory, step by step.

The store holds what it had acknowledged, so whatever a failover rolls back is there again: both must hold the same
after every step. BELAYER_TEST_STEPS is how many steps there are about (thousands take minutes).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from redis.crc import key_slot

from belayer.journal.connect import open_store
from belayer.journal.store import JournalStore
from tests.journal.test_against_model import STREAMS, Comparison, settled
from tests.journal.topologies import Cluster, Sentineled, SlotMove, detached, follow, in_step, sentineled
from tests.waiting import until

STEPS = int(os.environ.get("BELAYER_TEST_STEPS", "0"))
SHARDS = 2


def steps(usual: int, of_example: int) -> settings:
    """So many steps, or as many as were asked for. Nothing is tried again or shrunk: a fault's instant is gone."""
    return settings(
        max_examples=max(1, (STEPS or usual) // of_example),
        stateful_step_count=of_example,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


class OnCluster(Comparison):
    """Around a call its shard's slot moves to another node, whole before it or with the call in its midst."""

    kinds = ("moved", "moving", "moving", "moving")

    def __init__(self, made: Cluster) -> None:
        super().__init__()
        self.made = made
        self.turn = 0

    async def start(self) -> None:
        self.namespace = f"test-{os.urandom(6).hex()}"
        self.redis = await open_store(self.made.url, namespace=self.namespace, shards=SHARDS, timeout_s=60.0)

    async def stop(self) -> None:
        await self.redis.close()

    async def struck(self, kind: str, call: Callable[[JournalStore], Awaitable[Any]], word: bytes) -> Any:
        moves = [await self.move(shard) for shard in range(SHARDS)]
        for move in moves:
            await move.begin()
            if keys := (await move.keys())[self.turn % 2 :: 2]:
                await move.move(*keys)
        if kind == "moved":
            for move in moves:
                await move.finish()
            return await settled(call(self.redis))
        calling = asyncio.ensure_future(settled(call(self.redis)))
        await asyncio.wait([calling], timeout=0.02)
        for move in moves:
            await move.finish()
        return await calling

    async def move(self, shard: int) -> SlotMove:
        self.turn += 1
        slot = key_slot(f"{{belayer:{self.namespace}:{shard}}}".encode())
        source = await self.made.owner(slot)
        others = [node for node in self.made.primaries if node is not source]
        return SlotMove(self.made, slot, source, others[self.turn % 2])


class OnSentinels(Comparison):
    """What a call stored never reaches the replica, which is then promoted."""

    kinds = ("rolled back",)

    def __init__(self, made: Sentineled, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.made = made
        self._loop = loop

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """The one in which the servers were started, because they are stopped and started here."""
        return self._loop

    def end_loop(self) -> None:
        pass

    async def start(self) -> None:
        namespace = f"test-{os.urandom(6).hex()}"
        self.redis = await open_store(self.made.url, namespace=namespace, shards=SHARDS, timeout_s=60.0)

    async def stop(self) -> None:
        await self.redis.close()

    async def struck(self, kind: str, call: Callable[[JournalStore], Awaitable[Any]], word: bytes) -> Any:
        primary = await self.made.primary()
        (replica,) = (server for server in self.made.servers if server is not primary)
        await until(lambda: in_step(primary, replica), what="the replica")
        async with detached(primary, replica):
            outcome = await settled(call(self.redis))
        await self.made.fail_over(replica)
        await until(lambda: self.same(), what="what was rolled back")
        await primary.start()
        await until(lambda: follow(replica, 1), what="the old primary")
        return outcome

    async def same(self) -> bool:
        """Whether the server has again what the model has."""
        for stream in STREAMS:
            if await self.redis.read(stream) != await self.model.read(stream):
                return False
        return True


def test_slots_that_move(shared_cluster: Cluster) -> None:
    run_state_machine_as_test(lambda: OnCluster(shared_cluster), settings=steps(200, 20))


def test_failovers_that_roll_back(tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        context = sentineled(tmp_path / "s")
        made = runner.run(context.__aenter__())
        try:
            run_state_machine_as_test(lambda: OnSentinels(made, runner.get_loop()), settings=steps(48, 12))
        finally:
            runner.run(context.__aexit__(None, None, None))
