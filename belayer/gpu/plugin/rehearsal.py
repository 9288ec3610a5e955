"""A shadow's dry run of a handover, so that the real one finds every kernel loaded.

The first call of a CUDA kernel loads it, which takes milliseconds; a handover has few to spare. The shadow runs the
same code over scratch and throws the result away.
"""

from __future__ import annotations

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false
from array import array
from typing import Any

from belayer.gpu.ledger import Entry
from belayer.gpu.plugin.adoption import adopt
from belayer.gpu.plugin.slots import Slots

_TOKENS = 40


def rehearse(slots: Slots, tree: Any, allocator: Any, slot_table: Any) -> None:
    """Adopt two made-up requests into an empty cache, and set slots aside. The caller flushes the cache afterwards."""
    import torch

    entries = []
    for row in range(2):
        first = 1 + row * _TOKENS
        slot_table[row, :_TOKENS] = torch.arange(first, first + _TOKENS, device=slot_table.device)
        entries.append(Entry(row, row, array("q", range(first, first + _TOKENS)), _TOKENS - 1, 0))
    reserve = torch.arange(allocator.size - 1, allocator.size, device=slot_table.device)
    adopt(tree, allocator, slot_table, entries, reserve)
    slots.quarantine(reserve)
    slots.release_quarantine()
    slots.keep_reserve()
    slots.forget()
    slot_table.zero_()
