"""Belayer's plugin for SGLang, found through the entry point group `sglang.srt.plugins`.

Without BELAYER_MEMORY_SOCKET in the environment it does nothing. With it, an engine's weights, KV cache and slot
table live in the memory server's arena, and its ledger says what is in them. No fork, no patch file: every hook goes
through SGLang's HookRegistry. When a hook cannot be placed the engine ends: it would serve without protection.
"""

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import sys

KNOWN_VERSIONS = ("0.5.17",)

_LOADER = "sglang.srt.model_loader.loader.get_model_loader"
_SLOT_TABLE = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool"
_KV_POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal"
_SIZES = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
_STREAMER = "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def register() -> None:
    """SGLang calls this in each of its processes."""
    if not os.environ.get("BELAYER_MEMORY_SOCKET"):
        return
    from belayer.gpu.errors import UnsupportedEngineError

    try:
        _register()
    except UnsupportedEngineError as error:
        # SGLang logs an exception of a plugin and goes on without it; ending the process is the only way to refuse.
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
        os._exit(2)


def _register() -> None:
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from belayer.gpu.errors import UnsupportedEngineError
    from belayer.gpu.plugin.cache import Cache
    from belayer.gpu.plugin.engine import Engine
    from belayer.gpu.plugin.link import Link
    from belayer.gpu.plugin.weights import Weights

    if sglang.__version__ not in KNOWN_VERSIONS:
        raise UnsupportedEngineError("SGLang", sglang.__version__, ", ".join(KNOWN_VERSIONS))
    link = Link.from_environment()
    weights, cache = Weights(link), Cache(link)
    engine = Engine(link, weights, cache)
    place = HookRegistry.register
    place(_LOADER, weights.model_loader, HookType.AROUND)
    place(f"{_SLOT_TABLE}.__init__", cache.slot_table_made, HookType.AFTER)
    place(f"{_SLOT_TABLE}.free", engine.row_freed, HookType.BEFORE)
    place(f"{_SLOT_TABLE}.clear", engine.rows_cleared, HookType.BEFORE)
    place(_KV_POOL, cache.kv_buffers, HookType.AROUND)
    place(f"{_SIZES}._profile_available_bytes", cache.available_bytes, HookType.AROUND)
    place(f"{_SIZES}._apply_token_constraints", cache.token_capacity, HookType.AROUND)
    place(f"{_SCHEDULER}.run_event_loop", engine.loop_starts, HookType.BEFORE)
    place(f"{_RECEIVER}._pull_raw_reqs", engine.requests_are_pulled, HookType.AROUND)
    place(f"{_SCHEDULER}.process_input_requests", engine.loop_turns, HookType.BEFORE)
    place(f"{_SCHEDULER}._get_new_batch_prefill_raw", engine.prefill_is_chosen, HookType.AROUND)
    place(f"{_SCHEDULER}.run_batch", engine.step_begins, HookType.BEFORE)
    place(f"{_SCHEDULER}.process_batch_result", engine.step_ends, HookType.BEFORE)
    place(f"{_SCHEDULER}.process_batch_result", engine.step_ended, HookType.AFTER)
    place(f"{_SCHEDULER}.flush_cache", engine.cache_flushed, HookType.AROUND)
    place(f"{_SCHEDULER}.continue_generation", engine.generation_continues, HookType.BEFORE)
    place(_STREAMER, engine.tokens_go_out, HookType.BEFORE)
    for source in ("disk", "distributed", "tensor", "ipc"):
        place(f"{_UPDATER}.update_weights_from_{source}", engine.weights_updated, HookType.AROUND)
