"""A shadow's dry run of a handover, so that the real one finds every kernel loaded.

The first call of a CUDA kernel loads it, which takes milliseconds; a handover has few to spare. The shadow runs the
same code over scratch and throws the result away.
"""

from __future__ import annotations

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false
from array import array
from typing import Any

from belayer.gpu.ledger import MAX_RESERVE, Entry
from belayer.gpu.plugin.adoption import adopt
from belayer.gpu.plugin.ranks import Ranks
from belayer.gpu.plugin.slots import Slots

_MAX_REQUESTS = 64


def rehearse(slots: Slots, tree: Any, allocator: Any, slot_table: Any, ranks: Ranks) -> None:
    """Adopt made-up requests that fill an empty cache, and set slots aside. The caller flushes the cache afterwards.

    As many and as large as in earnest, so that the memory that it takes is at hand then.
    """
    import torch

    rows, width = slot_table.shape
    count = min(rows, _MAX_REQUESTS)
    kept = min(MAX_RESERVE, allocator.size // 8)
    tokens = min(width, (allocator.size - kept - 1) // count)
    entries = []
    for row in range(count):
        first = 1 + row * tokens
        slot_table[row, :tokens] = torch.arange(first, first + tokens, device=slot_table.device)
        entries.append(Entry(row, row, array("q", range(first, first + tokens)), tokens - 1, 0))
    reserve = range(allocator.size - kept, allocator.size)
    _, free = adopt(tree, allocator, slot_table, entries, reserve, ranks)
    slots.lay_out(free, reserve)
    slots.release_quarantine()
    slots.keep_reserve()
    slots.forget()
    slot_table.zero_()
