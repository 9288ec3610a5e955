"""Which of SGLang's features an engine may not use under Belayer: those by which others write to its KV cache.

A handover is safe because only the scheduler's thread launches work that writes there, and only into slots that it
has allocated. Threads that move KV between memories, network cards that write it, draft models with a cache of their
own, pipelines, and a prefill that runs beside the decode steps in a CUDA stream of its own (pdmux), are unknown to
the ledger and to the quarantine.
"""

from __future__ import annotations

from typing import Any

from belayer.gpu.errors import UnsupportedEngineError

_KNOWN: dict[str, tuple[object, ...]] = {
    "disaggregation_mode": (None, "null"),
    "enable_hierarchical_cache": (None, False),
    "enable_lmcache": (None, False),
    "enable_unified_memory": (None, False),
    "speculative_algorithm": (None,),
    "pp_size": (None, 1),
    "enable_pdmux": (None, False),
    "enable_hisparse": (None, False),
    "enable_dp_attention": (None, False),
}


def refuse_unknown(server_args: Any) -> None:
    """UnsupportedEngineError when the engine was started with one of them."""
    for name, known in _KNOWN.items():
        value = getattr(server_args, name, None)
        if value not in known:
            raise UnsupportedEngineError(f"SGLang's option {name}", str(value), f"only {known[-1]}")
