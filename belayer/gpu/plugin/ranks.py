"""The tensor parallel ranks of one engine, each a process with a memory server of its own, acting as one.

SGLang's ranks run the same loop in lockstep: rank 0 broadcasts what it received, and each rank works out the same
batches from it. So whatever changes what a rank would schedule must happen on all of them in the same turn. Rank 0
leads: it puts what is to be done in with the requests (`Lead`), and every rank does it at that point, waiting for its
own memory server if that is not as far yet. What ranks found in their own ledgers they tell each other and agree on.

Invariant: a function here gives the same result on all ranks. A rank that dies takes the whole engine with it.
"""

from __future__ import annotations

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from belayer.gpu.ledger import Entry

TAIL_TOKENS = 8
"""Ranks may be a step or two apart when their engine dies; further apart is not explained by that."""
_Said = TypeVar("_Said")


@dataclass(frozen=True, slots=True)
class Lead:
    """From rank 0 to all, in with the requests: what to do in this turn."""

    what: Literal["arm", "granted", "unlocked", "released", "gathered"]


@dataclass(frozen=True, slots=True)
class Claim:
    """What a rank's ledger says of one row; its last tokens stand for all."""

    row: int
    request: int
    length: int
    tail: tuple[int, ...]

    @classmethod
    def of(cls, entry: Entry) -> Claim:
        return cls(entry.row, entry.request, len(entry.token_ids), tuple(entry.token_ids[-TAIL_TOKENS:]))


class Ranks:
    """This process's place among the ranks. `group` is SGLang's gloo group of them."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    @classmethod
    def of_this_process(cls) -> Ranks:
        """As SGLang has set them up."""
        from sglang.srt.distributed import get_tp_group

        group = get_tp_group()
        return cls(group.rank_in_group, group.world_size, group.cpu_group)

    def all_say(self, mine: _Said) -> list[_Said]:
        """What each rank says, in order of rank. Every rank must call it at the same point."""
        if self.size == 1:
            return [mine]
        import torch

        said: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(said, mine, group=self._group)
        return said


def agree(said: Sequence[Sequence[Claim]], mine: Sequence[Entry]) -> list[Entry]:
    """The rows that every rank has for the same request, as long as rank 0 has them: nobody was given more tokens.

    A rank that is behind has the KV all the same: rank 0 sampled its last token from what all ranks had computed.
    `mine` are this rank's entries, of which its own claims tell.
    """
    if len(said) == 1:
        return list(mine)
    own = {entry.row: entry for entry in mine}
    others = [{claim.row: claim for claim in claims} for claims in said[1:]]
    agreed: list[Entry] = []
    for lead in said[0]:
        if not all((claim := other.get(lead.row)) is not None and _is_same(lead, claim) for other in others):
            continue
        entry = own[lead.row]
        missing = lead.length - len(entry.token_ids)
        token_ids = entry.token_ids[: lead.length] + array("q", lead.tail[-missing:] if missing > 0 else ())
        agreed.append(Entry(entry.row, entry.request, token_ids, lead.length - 1, entry.weight_version))
    return agreed


def _is_same(one: Claim, other: Claim) -> bool:
    """Whether both are of one request, and equal where both name their tokens."""
    if one.request != other.request or abs(one.length - other.length) >= TAIL_TOKENS:
        return False
    begin = max(one.length - len(one.tail), other.length - len(other.tail))
    end = min(one.length, other.length)
    return begin < end and _part(one, begin, end) == _part(other, begin, end)


def _part(claim: Claim, begin: int, end: int) -> tuple[int, ...]:
    first = claim.length - len(claim.tail)
    return claim.tail[begin - first : end - first]
