"""How far each consumer group is behind on the control streams, as the server counts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import hiredis

from belayer.journal.keys import Keys
from belayer.journal.link import Reply
from belayer.journal.server import Server


class Group(NamedTuple):
    """One consumer group on one shard's control stream."""

    name: str
    shard: int
    consumers: int
    pending: int
    """Notices that its consumers have taken and not finished."""
    lag: int
    """Notices that it has not had delivered yet; -1 when the server cannot tell (after notices were trimmed)."""


async def look_at_groups(servers: Sequence[Server], keys: Keys) -> list[Group]:
    """All groups of all shards (`servers`: one for each shard)."""
    found: list[Group] = []
    for shard, server in enumerate(servers):
        reply = await server.ask("XINFO", "GROUPS", keys.control(shard), accept=("ERR no such key",))
        if not isinstance(reply, hiredis.ReplyError):
            found += [_group(shard, fields) for fields in reply]
    return found


def _group(shard: int, fields: list[Reply]) -> Group:
    named = dict(zip(fields[::2], fields[1::2], strict=True))
    lag = named.get(b"lag")
    return Group(
        named[b"name"].decode(), shard, named[b"consumers"], named[b"pending"], lag if isinstance(lag, int) else -1
    )
