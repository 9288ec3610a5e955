"""Requests that go on where a dead engine left them, without a prefill.

A caller that resumes names its request (the id that it had on the dead engine) and how many tokens it has, prompt
included; it sends only the last few of them. The rest comes from the ledger. When the KV of all but the last token
was adopted, the request joins the decode batch as it is: its next token comes from the same kernels, over the same
KV, as if the old engine had sampled it. Otherwise SGLang prefills what is missing, as for any cached prefix.
"""

from __future__ import annotations

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false
import logging
import math
import time
from array import array
from collections.abc import Iterable
from typing import Any

from belayer.gpu.http_engine import RESUME_KEY, RESUME_UNKNOWN
from belayer.gpu.ledger import Entry, request_digest
from belayer.gpu.plugin.copies import to_device

_log = logging.getLogger("belayer")


class Resumption:
    """What the last holder knew about its requests, for as long as callers may come back for them."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._waiting: set[str] = set()
        self._missing: set[int] = set()
        self.came_s = math.inf
        """When the last one came."""

    @property
    def all_came(self) -> bool:
        """Whether a caller has come back for every request."""
        return not self._missing

    def learn(self, entries: Iterable[Entry]) -> None:
        """The ledger's entries at the handover; those of an earlier one are forgotten."""
        self._entries = {entry.request: entry for entry in entries}
        self._missing = set(self._entries)
        self.came_s = math.inf

    def completed(self, scheduler: Any, requests: Iterable[Any]) -> list[Any]:
        """The same requests, resuming ones with their whole prefix; one that the ledger does not know is aborted."""
        each = [one for request in requests for one in _members(request)]
        return [request for request in each if self._complete(scheduler, request)]

    def _complete(self, scheduler: Any, recv_req: Any) -> bool:
        custom = getattr(getattr(recv_req, "sampling_params", None), "custom_params", None)
        if not isinstance(custom, dict) or RESUME_KEY not in custom:
            return True
        old_id, have = custom[RESUME_KEY]
        known = have - len(recv_req.input_ids)
        if known > 0:
            digest = request_digest(str(old_id))
            self._missing.discard(digest)
            self.came_s = time.monotonic()
            entry = self._entries.get(digest)
            if entry is None or len(entry.token_ids) < known:
                _abort(scheduler, recv_req, f"this engine {RESUME_UNKNOWN} ({old_id} at token {have})")
                return False
            recv_req.input_ids = entry.token_ids[:known] + array("q", recv_req.input_ids)
        self._waiting.add(recv_req.rid)
        return True

    def join(self, scheduler: Any, running_batch: Any) -> Any:
        """Move resuming requests whose KV is all there from the queue into the decode batch; returns that batch."""
        if not self._waiting:
            return running_batch
        room = scheduler.get_num_allocatable_reqs(len(running_batch.reqs))
        ready: list[Any] = []
        for request in scheduler.waiting_queue:
            if request.rid not in self._waiting:
                continue
            self._waiting.discard(request.rid)
            if len(ready) < room and _is_all_there(scheduler, request):
                ready.append(request)
        if not ready:
            return running_batch
        joined = set(map(id, ready))
        scheduler.waiting_queue = [request for request in scheduler.waiting_queue if id(request) not in joined]
        batch = _decode_batch(scheduler, ready)
        if running_batch.is_empty():
            return batch
        running_batch.merge_batch(batch)
        return running_batch


def _members(recv_req: Any) -> Iterable[Any]:
    """Requests that came in one HTTP request come as one message."""
    return recv_req.batch if type(recv_req).__name__ == "BatchTokenizedGenerateReqInput" else (recv_req,)


def _abort(scheduler: Any, recv_req: Any, message: str) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    _log.warning("belayer: %s", message)
    reason = {"type": "abort", "status_code": 503, "message": message}
    scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(finished_reason=reason, rid=recv_req.rid), recv_req)


def _is_all_there(scheduler: Any, request: Any) -> bool:
    if request.grammar is not None or request.multimodal_inputs is not None or scheduler.enable_lora:
        return False
    request.init_next_round_input(scheduler.tree_cache)
    return len(request.prefix_indices) == len(request.origin_input_ids) - 1


def _decode_batch(scheduler: Any, requests: list[Any]) -> Any:
    """The batch that SGLang would have after these requests' prefill, but with their last token still to be run.

    After SGLang's own prepare_for_prebuilt, by which a decode engine takes over from a prefill engine.
    """
    import torch
    from sglang.srt.managers.overlap_utils import RelayPayload
    from sglang.srt.managers.schedule_batch import ReqKvInfo, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    pool, tree = scheduler.req_to_token_pool, scheduler.tree_cache
    batch = ScheduleBatch.init_new(
        requests,
        pool,
        scheduler.token_to_kv_pool_allocator,
        tree,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
    )
    batch.forward_mode = ForwardMode.DECODE
    rows = pool.alloc(requests)
    assert rows is not None, "the caller has counted the free rows"
    lengths = []
    for request in requests:
        length = len(request.prefix_indices)
        lengths.append(length)
        tree.inc_lock_ref(request.last_node)
        pool.write((request.req_pool_idx, slice(0, length)), request.prefix_indices)
        request.kv = ReqKvInfo(kv_allocated_len=length, swa_evicted_seqlen=0)
        request.kv_committed_len = length
        request.cache_protected_len = length
        request.cached_tokens += length
        request.already_computed = length
        request.set_extend_range(length, length)
        if request.return_logprob:  # a prefill would have: otherwise one after a retraction takes itself for the first
            scheduler.batch_result_processor.logprob_result_processor._initialize_empty_logprob_containers(request)
        request.time_stats.set_prefill_finished_time()
    device = batch.device
    batch.req_pool_indices_cpu = torch.tensor(rows, dtype=torch.int64)
    batch.req_pool_indices = to_device(batch.req_pool_indices_cpu, device)
    batch.seq_lens_cpu = torch.tensor(lengths, dtype=torch.int64)
    batch.seq_lens = to_device(batch.seq_lens_cpu, device)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.seq_lens_sum = sum(lengths)
    batch.prefix_lens = lengths
    batch.extend_lens = [0] * len(requests)
    batch.extend_num_tokens = 0
    batch.multimodal_inputs = [None] * len(requests)
    if batch.return_logprob:
        batch.top_logprobs_nums = [request.logprob.top_logprobs_num for request in requests]
        batch.token_ids_logprobs = [request.logprob.token_ids_logprob for request in requests]
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, batch.model_config.vocab_size)
    last = to_device(torch.tensor([request.origin_input_ids[-1] for request in requests], dtype=torch.int64), device)
    scheduler.future_map.stash(batch.req_pool_indices, RelayPayload(bonus_tokens=last))
    batch.input_ids = None
    return batch
