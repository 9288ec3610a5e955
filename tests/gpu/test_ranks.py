"""What tensor parallel ranks agree on, and their memory servers as one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from array import array
from pathlib import Path

import pytest

from belayer.errors import InputError
from belayer.gpu import wire
from belayer.gpu.ledger import Entry
from belayer.gpu.memory_process import MemoryProcess
from belayer.gpu.memory_ranks import MemoryRanks, tensor_parallel_size
from belayer.gpu.plugin.ranks import TAIL_TOKENS, Claim, agree
from tests.gpu.test_memory_server import Child, a_main
from tests.waiting import DEADLINE_S

TOKENS = list(range(100, 160))


def entry(row: int, length: int, request: int = 7, tokens: list[int] = TOKENS) -> Entry:
    return Entry(row, request, array("q", tokens[:length]), length - 1, 3)


def agreed(*ranks: list[Entry]) -> list[list[Entry]]:
    """What each of the ranks makes of it."""
    said = [[Claim.of(one) for one in entries] for entries in ranks]
    return [agree(said, entries) for entries in ranks]


@pytest.mark.parametrize("other", [38, 40, 41, 40 + TAIL_TOKENS - 1])
def test_rows_are_as_long_as_rank_0_has_them_on_every_rank(other: int) -> None:
    one, two = agreed([entry(2, 40), entry(5, 3, 8)], [entry(2, other), entry(5, 3, 8)])
    assert one == two == [entry(2, 40), entry(5, 3, 8)]


@pytest.mark.parametrize(
    "other",
    [
        [],
        [entry(3, 40)],
        [entry(2, 40, request=8)],
        [entry(2, 40 - TAIL_TOKENS)],
        [entry(2, 40, tokens=[*TOKENS[:38], 1, 2])],
        [entry(2, 39, tokens=[*TOKENS[:38], 1])],
    ],
)
def test_a_row_that_another_rank_has_otherwise_is_nobodys(other: list[Entry]) -> None:
    assert agreed([entry(2, 40), entry(5, 9)], [*other, entry(5, 9)]) == [[entry(5, 9)]] * 2
    assert agreed(other, [entry(2, 40)]) == [[], []]


def test_one_rank_agrees_with_itself() -> None:
    assert agree([[]], [entry(2, 40)]) == [entry(2, 40)]


def test_the_number_of_ranks_is_what_the_engine_is_started_with() -> None:
    assert tensor_parallel_size(["--model-path", "m"]) == 1
    assert tensor_parallel_size(["--tp", "2", "--port", "1"]) == tensor_parallel_size(["--tp-size=2"]) == 2
    with pytest.raises(InputError, match="'--port' is no tensor parallel size"):
        tensor_parallel_size(["--tp", "--port"])
    with pytest.raises(InputError, match=r"2 ranks need \{rank\} in its path"):
        MemoryRanks(Path("memory.sock"), 2)


async def test_every_server_has_been_asked_before_anything_else_runs(tmp_path: Path) -> None:
    """Streams that resume in that moment keep the loop busy: a handover must not wait for them."""
    listeners = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    for rank, listener in enumerate(listeners):
        listener.bind(str(tmp_path / f"memory{rank}.sock"))
        listener.listen()
    request, turn = wire.Arm("a"), asyncio.Event()
    asking = asyncio.create_task(MemoryRanks(tmp_path / "memory{rank}.sock", 2).ask(request, 30))
    asyncio.get_running_loop().call_soon(turn.set)
    await turn.wait()
    for rank, listener in enumerate(listeners):
        listener.setblocking(False)
        connection, _ = listener.accept()
        with listener, connection:
            assert [wire.receive_request(connection) for _ in range(2)] == [wire.Register("host", "control"), request]
            wire.send(connection, wire.Registered(wire.Weights(), None))
            wire.send(connection, wire.Facts({"arm_s": rank + 1.0}))
    assert (await asking).facts == {"arm_s": 2.0}


async def test_each_rank_has_a_server_of_its_own(tmp_path: Path) -> None:
    memory = MemoryProcess("cpu", tmp_path / "memory{rank}.sock", os.getpid(), log=tmp_path / "log")
    started = await asyncio.gather(*(memory.of_rank(rank).ensure() for rank in range(2)))
    assert started == [True, True]
    assert [status.device for status in await MemoryRanks(memory.socket, 2).status()] == ["cpu", "cpu"]
    assert {path.name for path in tmp_path.glob("*.sock")} == {"memory0.sock", "memory1.sock"}
    assert MemoryProcess("cuda:3", memory.socket, 1).of_rank(1).device == "cuda:4"


async def test_an_engine_is_dying_with_its_first_rank_and_dead_with_its_last(tmp_path: Path) -> None:
    memory = MemoryProcess("cpu", tmp_path / "memory{rank}.sock", os.getpid(), log=tmp_path / "log")
    await asyncio.gather(*(memory.of_rank(rank).ensure() for rank in range(2)))
    ranks = [Child(), Child()]
    for rank, child in enumerate(ranks):
        a_main(memory.of_rank(rank).socket, lambda child=child: child)
    watching = asyncio.Event()
    async with (
        asyncio.timeout(DEADLINE_S),
        contextlib.aclosing(MemoryRanks(memory.socket, 2).events(watching)) as events,
    ):
        first = asyncio.ensure_future(anext(events))
        await watching.wait()
        ranks[1].kill()
        assert (await first).kind == "dying"
        second = asyncio.ensure_future(anext(events))
        statuses = await MemoryRanks(memory.socket, 2).status()
        while statuses[1].holder:
            statuses = await MemoryRanks(memory.socket, 2).status()
        assert statuses[0].holder == "a" and not second.done()
        ranks[0].kill()
        assert (await second).kind == "dead"
