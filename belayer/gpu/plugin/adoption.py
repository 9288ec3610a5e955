"""Take over KV that a dead engine computed: its proven prefixes into the radix tree, their slots off the free list.

Source of the rule: a token that was sampled proves that the KV of every token before it was complete, because the
forward pass that sampled it read that KV. Everything else is free, and is computed again.

Invariant: afterwards every slot is either in the tree, once, or free, and the same ones are on every rank. When the
ledger and the slot table contradict each other (a slot out of range or claimed twice), or ranks do, nothing is adopted
at all.
"""

from __future__ import annotations

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from belayer.gpu.ledger import Entry
from belayer.gpu.plugin.ranks import Ranks

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("belayer")


@dataclass(frozen=True, slots=True)
class Adopted:
    """Tokens now in the tree, and the requests that they belong to."""

    tokens: int
    requests: int


def adopt(
    tree: Any,
    allocator: Any,
    slot_table: torch.Tensor,
    entries: Sequence[Entry],
    never: torch.Tensor,
    ranks: Ranks,
) -> Adopted:
    """Fill an empty tree and allocator. `slot_table`: rows x width, int32. `never`: slots that no request can have."""
    adopted = _fill(tree, allocator, slot_table, entries, never)
    if ranks.size > 1 and len(set(ranks.all_say((adopted.tokens, int(allocator.free_pages.sum()))))) > 1:
        _log.error("belayer: the ranks do not have the same slots; nothing is adopted")
        tree.reset()
        allocator.clear()
        return Adopted(0, 0)
    return adopted


def _fill(
    tree: Any, allocator: Any, slot_table: torch.Tensor, entries: Sequence[Entry], never: torch.Tensor
) -> Adopted:
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    page = allocator.page_size
    for entry in entries:
        proven = entry.proven // page * page
        if proven:
            slots = slot_table[entry.row, :proven].to(torch.int64)
            tree.insert(InsertParams(key=RadixKey(entry.token_ids[:proven]), value=slots))
    if not tree.total_size():
        return Adopted(0, 0)
    used = tree.all_values_flatten()
    pages = used // page
    limit = allocator.size // page
    claims = torch.zeros(limit + 1, dtype=torch.int32, device=used.device)
    in_range = (pages >= 1) & (pages <= limit)
    claims.index_add_(0, torch.where(in_range, pages, 0), torch.ones_like(pages, dtype=torch.int32))
    sound = in_range.all() & (claims[1:] <= page).all() & (claims[never // page] == 0).all()
    if not bool(sound):
        _log.error("belayer: the ledger and the slot table contradict each other; nothing is adopted")
        tree.reset()
        return Adopted(0, 0)
    claims[0] = 1  # the page that padding is written to is nobody's
    allocator.free_pages = torch.nonzero(claims == 0).flatten()
    allocator.release_pages = torch.empty((0,), dtype=torch.int64, device=used.device)
    return Adopted(int(used.numel()), len(entries))
