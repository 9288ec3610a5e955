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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from belayer.gpu.ledger import MAX_RESERVE
from belayer.gpu.plugin.copies import to_device

if TYPE_CHECKING:
    import numpy as np
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

    def lay_out(self, free: np.ndarray, reserve: Sequence[int] | None) -> None:
        """Give an allocator its free pages. With a reserve only those in it: the rest may still be written by the
        dying holder, and is quarantined.
        """
        import numpy as np
        import torch

        allocator = self._allocator
        quarantined = free[:0]
        if reserve is not None:
            is_reserve = np.zeros(allocator.size + 1, dtype=np.bool_)
            is_reserve[np.asarray(reserve, dtype=np.int64)] = True
            quarantined, free = free[~is_reserve[free]], free[is_reserve[free]]
        allocator.free_pages = to_device(torch.from_numpy(free), allocator.device)
        allocator.release_pages = allocator.free_pages[:0]
        self._quarantine = self._lock("quarantine", torch.from_numpy(quarantined))  # on the host: nobody uses them

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
        self._allocator.free(slots.to(self._allocator.device))
