"""A node that is cut off from the others but not from us has an old view: it is not believed for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.crc import key_slot

from tests.journal.faults import opened, stored, written
from tests.journal.topologies import SLOTS, ClusterNode

HALF = SLOTS // 2


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """First the node that is cut off: it believes that it has the lower half of the slots, and a peer, which is dead,
    the upper. Then one that has all of them by now, as after a failover that the first one did not hear of."""
    old, dead, new = (ClusterNode(tmp_path / f"n{number}", number, {}, None, "127.0.0.1") for number in range(3))
    views = {
        old: [old.line("myself,master", "-", f"0-{HALF - 1}"), dead.line("master", "-", f"{HALF}-{SLOTS - 1}")],
        new: [new.line("myself,master", "-", f"0-{SLOTS - 1}")],
    }
    for node, lines in views.items():
        node.folder.mkdir()
        (node.folder / "nodes.conf").write_text("\n".join([*lines, "vars currentEpoch 1 lastVoteEpoch 0\n"]))
    async with old, new:
        yield f"redis+cluster://127.0.0.1:{old.port},127.0.0.1:{new.port}"


@pytest.mark.parametrize("upper", [False, True], ids=["its own slots", "its dead peer's slots"])
async def test_the_next_node_is_asked(url: str, namespace: str, upper: bool) -> None:
    names = (f"{namespace}{number}" for number in range(100))
    there = next(name for name in names if (key_slot(f"{{belayer:{name}:0}}".encode()) >= HALF) is upper)
    store = await opened(url, namespace=there, shards=1)
    await written(store)
    assert len(await stored(store)) == 4
    await store.close()
