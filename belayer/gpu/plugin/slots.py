"""Slots that are nobody's to give: the reserve, and what is quarantined while the last holder is dying.

A holder keeps a few slots that it never writes. When it dies, the next one can write there at once, while kernels
that the dying one had launched may still write to the slots that it had taken or could have taken. Once it is proved
dead, everything that is not adopted is free again and the new holder sets a reserve of its own aside.

Such slots are locked nodes of the radix tree, under keys that no request can have: so SGLang's own accounting of
free, cached and locked slots stays right.
"""

from __future__ import annotations

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false
from array import array
from typing import TYPE_CHECKING, Any

from belayer.gpu.ledger import MAX_RESERVE

if TYPE_CHECKING:
    import torch

_SHARE = 8
"""The reserve is at most one in so many of the cache's slots."""


class Slots:
    """The slots of one scheduler's cache that are set aside."""

    def __init__(self, tree: Any, allocator: Any) -> None:
        import torch

        self._tree = tree
        self._allocator = allocator
        self._numbers = array("q")
        self._numbers.frombytes(torch.arange(allocator.size + 1).numpy().tobytes())
        self._reserve: Any = None
        self._quarantine: Any = None

    @property
    def quarantined(self) -> bool:
        return self._quarantine is not None

    def keep_reserve(self) -> list[int]:
        """Set a reserve aside (again) and return its slots; none when the cache has no room for it."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        if self._allocator.page_size != 1:
            return []
        count = min(MAX_RESERVE, self._allocator.size // _SHARE)
        missing = count - self._allocator.available_size()
        if missing > 0:
            self._tree.evict(EvictParams(num_tokens=missing))
        slots = self._allocator.alloc(count)
        if slots is None:
            return []
        self._reserve = self._lock("reserve", slots)
        return slots.tolist()

    def quarantine(self, reserve: torch.Tensor) -> None:
        """Leave only the reserve free: everything else that is free now may still be written by the dying holder."""
        import torch

        allocator = self._allocator
        free = torch.cat((allocator.free_pages, allocator.release_pages))
        is_reserve = torch.zeros(allocator.size + 1, dtype=torch.bool, device=free.device)
        is_reserve[reserve] = True
        kept = is_reserve[free]
        allocator.free_pages = free[kept]
        allocator.release_pages = torch.empty((0,), dtype=torch.int64, device=free.device)
        self._quarantine = self._lock("quarantine", free[~kept])

    def release_quarantine(self) -> None:
        """The dying holder is dead."""
        node, self._quarantine = self._quarantine, None
        if node is not None:
            self._unlock(node)

    def forget(self) -> None:
        """The tree and the allocator were emptied: nothing is set aside any more."""
        self._reserve = self._quarantine = None

    def _lock(self, name: str, slots: torch.Tensor) -> Any:
        """A locked node for the slots; None when there are none."""
        if not slots.numel():
            return None
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(self._numbers, f"belayer-{name}", limit=slots.numel())
        node = self._tree.insert(InsertParams(key=key, value=slots)).last_device_node
        self._tree.inc_lock_ref(node)
        return node

    def _unlock(self, node: Any) -> None:
        slots = node.value
        self._tree.dec_lock_ref(node)
        self._tree._delete_leaf(node)
        self._allocator.free(slots)
