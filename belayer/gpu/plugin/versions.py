"""The versions of SGLang that the plugin knows, and where they keep what it needs of a request.

From some version after 0.5.17 on, a request's row in the slot table and how much of its KV is complete are no longer
in the request but in its `kv`.
"""

from __future__ import annotations

# SGLang is the engine's, not in this project's own environment.
# pyright: reportMissingImports=false
from typing import Any

KNOWN_VERSIONS = ("0.5.17",)
_IN_KV = object()


def row_of(request: Any) -> int | None:
    """Its row in the slot table; None when it has none."""
    row: Any = getattr(request, "req_pool_idx", _IN_KV)
    return request.kv.req_pool_idx if row is _IN_KV else row


def hold_prefix(request: Any, length: int) -> None:
    """Say of a request that has its row: the KV of its first tokens is complete, in slots that are the tree's."""
    if hasattr(request, "req_pool_idx"):
        from sglang.srt.managers.schedule_batch import ReqKvInfo

        request.kv = ReqKvInfo(kv_allocated_len=length, swa_evicted_seqlen=0)
        request.kv_committed_len = request.cache_protected_len = length
    else:
        kv = request.kv
        kv.kv_allocated_len = kv.kv_committed_len = kv.cache_protected_len = length
