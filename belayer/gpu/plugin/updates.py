"""Weight updates in place, as versions: begin before the first write, commit once the engine would serve them.

SGLang updates weights in one call or in many (buckets). The version is committed when a call asks to flush the cache,
which callers do last, or at the next forward pass: from then on tokens come from these weights. A crash before that
leaves the version torn in the memory server, and torn weights are never served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from belayer.gpu.plugin.memory import Memory


class WeightUpdates:
    """Around SGLang's four update calls."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def around(self, original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
        """An update by any source. One that fails leaves the version begun: the next one may finish it."""
        memory = self._memory
        if not memory.epoch or memory.ledger is None:
            return original(manager, recv_req)
        memory.ledger.excuse(True)
        try:
            return self._update(original, manager, recv_req)
        finally:
            memory.ledger.excuse(False)

    def _update(self, original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
        memory = self._memory
        named = str(getattr(recv_req, "weight_version", None) or "")
        memory.begin_update(int(named) if named.isdecimal() else None)
        result = original(manager, recv_req)
        if result.success and getattr(recv_req, "flush_cache", False):
            memory.commit_update()
        elif not result.success:
            memory.update_failed()
        return result
