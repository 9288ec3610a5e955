"""Take over KV that a dead engine computed: its proven prefixes into the radix tree, their slots off the free list.

Source of the rule: a token that was sampled proves that the KV of every token before it was complete, because the
forward pass that sampled it read that KV. Everything else is free, and is computed again.

Invariant: every slot is either in the tree, once, or free, and the same ones are on every rank. When the ledger and the
slot table contradict each other (a slot out of range or claimed twice), or ranks do, nothing is adopted at all.

The slot table is read from the device once; the rest is worked out on the host. While the driver tears a dead process
down, each time that the host waits for the device costs milliseconds.
"""

from __future__ import annotations

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

from belayer.gpu.ledger import Entry
from belayer.gpu.plugin.copies import to_device
from belayer.gpu.plugin.ranks import Ranks

if TYPE_CHECKING:
    import numpy as np
    import torch

_log = logging.getLogger("belayer")


@dataclass(frozen=True, slots=True)
class Adopted:
    """Tokens now in the tree, and the requests that they belong to."""

    tokens: int
    requests: int


def adopt(
    tree: Any, allocator: Any, slot_table: torch.Tensor, entries: Sequence[Entry], never: Sequence[int], ranks: Ranks
) -> tuple[Adopted, np.ndarray]:
    """Fill an empty tree; also returns which pages are free now, for the caller to give the allocator.

    `slot_table`: rows x width, int32. `never`: slots that no request can have.
    """
    adopted, free = _fill(tree, allocator, slot_table, entries, never)
    if ranks.size > 1 and len(set(ranks.all_say((adopted.tokens, crc32(free.tobytes()))))) > 1:
        _log.error("belayer: the ranks do not have the same slots; nothing is adopted")
        tree.reset()
        return Adopted(0, 0), _all_pages(allocator)
    return adopted, free


def _all_pages(allocator: Any) -> np.ndarray:
    """All that may be handed out."""
    import numpy as np

    return np.arange(1, allocator.size // allocator.page_size + 1)


def _fill(
    tree: Any, allocator: Any, slot_table: torch.Tensor, entries: Sequence[Entry], never: Sequence[int]
) -> tuple[Adopted, np.ndarray]:
    import numpy as np
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    page, pages = allocator.page_size, allocator.size // allocator.page_size
    lengths = [entry.proven // page * page for entry in entries]
    if not any(lengths):
        return Adopted(0, 0), _all_pages(allocator)
    rows = to_device(torch.tensor([entry.row for entry in entries]), slot_table.device)
    slots = slot_table[rows, : max(lengths)]
    on_host, slots = slots.cpu().numpy(), slots.to(torch.int64)
    taken = np.zeros((pages + 1, page), dtype=np.bool_)
    by_slot = taken.reshape(-1)  # row by row, and a byte a slot: to touch new memory costs more than to count
    adopted, in_range = 0, True
    for entry, length, of_device, of_host in zip(entries, lengths, slots, on_host, strict=True):
        if length:
            key = RadixKey(entry.token_ids[:length])
            known = tree.insert(InsertParams(key=key, value=of_device[:length])).prefix_len
            own = of_host[known:length]
            adopted += len(own)
            in_range = in_range and (not len(own) or bool(page <= own.min() and own.max() < len(by_slot)))
            if in_range:
                by_slot[own] = True
    claimed = taken.any(axis=1)
    once = np.count_nonzero(taken) == adopted
    if not (in_range and once) or claimed[np.asarray(never, dtype=np.int64) // page].any():
        _log.error("belayer: the ledger and the slot table contradict each other; nothing is adopted")
        tree.reset()
        return Adopted(0, 0), _all_pages(allocator)
    claimed[0] = True  # the page that padding is written to is nobody's
    return Adopted(adopted, len(entries)), np.flatnonzero(~claimed)
