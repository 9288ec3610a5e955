"""Adopts made-up ledgers into SGLang's radix tree, in SGLang's interpreter, and prints what came of them as JSON.

Of each case: how many tokens the dead engine's rows had with KV, how many were adopted, and what is wrong (nothing).
"""

# torch and SGLang are not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import random
import sys
from array import array
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from belayer.gpu.ledger import Entry
from belayer.gpu.plugin.adoption import adopt
from belayer.gpu.plugin.ranks import Ranks
from belayer.gpu.plugin.slots import Slots

SIZE, WIDTH, ROWS, RESERVE = 600, 80, 9, 50


def rows_of(chosen: random.Random, table: torch.Tensor) -> tuple[list[Entry], list[int]]:
    """Rows that share beginnings, in the same slots or in their own; and the slots that are nobody's."""
    slots = chosen.sample(range(1, SIZE + 1), SIZE)
    entries: list[Entry] = []
    for row in range(1, ROWS):
        count = chosen.randrange(2, 60)
        tokens, own = [chosen.randrange(3) for _ in range(count)], [slots.pop() for _ in range(count)]
        if entries and chosen.random() < 0.6:
            other = chosen.choice(entries)
            shared = chosen.randrange(min(count, len(other.token_ids)))
            tokens[:shared] = other.token_ids[:shared]
            if chosen.random() < 0.7:
                own[:shared] = table[other.row, :shared].tolist()
        table[row, :count] = torch.tensor(own, dtype=torch.int32)
        entries.append(Entry(row, row, array("q", tokens), count - 1, 0))
    chosen.shuffle(entries)
    return entries, slots[:RESERVE]


def wrong(tree: Any, allocator: Any, entries: list[Entry], table: torch.Tensor, reserve: list[int] | None) -> str:
    """What contradicts the invariants; empty when nothing does."""
    held, free = tree.all_values_flatten().tolist(), allocator.free_pages.tolist()
    if sorted(held + free) != list(range(1, SIZE + 1)):
        return "a slot is lost or there twice"
    if reserve is not None and set(free) != set(reserve):
        return "the reserve alone should be free"
    said = {(int(table[one.row, at]), tuple(one.token_ids[: at + 1])) for one in entries for at in range(one.proven)}
    for one in entries:
        found = tree.match_prefix(MatchPrefixParams(key=RadixKey(one.token_ids[: one.proven]))).device_indices.tolist()
        if len(found) != one.proven or any(
            (s, tuple(one.token_ids[: at + 1])) not in said for at, s in enumerate(found)
        ):
            return f"row {one.row} is not found as it was"
    return ""


def case(number: int) -> dict[str, Any]:
    """Every fourth contradicts itself; every other one is adopted while the dead engine may still write."""
    chosen = random.Random(number)
    table = torch.zeros(ROWS, WIDTH, dtype=torch.int32)
    entries, reserve = rows_of(chosen, table)
    contradicts = number % 4 == 3
    if contradicts:
        one, other = entries[0], entries[-1]
        one.token_ids[0] = 7  # a beginning of its own
        table[one.row, 0] = chosen.choice((0, -5, SIZE + 1, reserve[0], int(table[other.row, other.proven - 1])))
    allocator = TokenToKVPoolAllocator(SIZE, torch.float32, "cpu", None, False)
    tree = RadixCache.create_simulated(mock_allocator=allocator)
    slots = Slots(tree, allocator)
    adopted, free = adopt(tree, allocator, table, entries, reserve, Ranks())
    only = reserve if number % 2 else None
    slots.lay_out(free, only)
    why = wrong(tree, allocator, entries if adopted.tokens else [], table, only)
    slots.release_quarantine()
    if not why and tree.total_size() + allocator.available_size() != SIZE:
        why = "the quarantine was not released"
    return {"contradicts": contradicts, "adopted": adopted.tokens, "wrong": why}


if __name__ == "__main__":
    sys.stdout.write(json.dumps([case(number) for number in range(200)]) + "\n")
