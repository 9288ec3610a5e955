"""The scheduler's side: the ledger after each step, a shadow that waits, and the moment when it takes over.

A shadow serves its warm-up requests on scratch. Armed, it holds every request that comes, in order, until it is
granted the lease; then it maps the arena, adopts what the ledger proves and lets the requests go. All of it happens
in the scheduler's own thread, between two turns of its loop: nothing else touches its tree or its allocator.
"""

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any, Literal

from belayer.gpu import wire
from belayer.gpu.ledger import Entry, Ledger, request_digest
from belayer.gpu.plugin.adoption import Adopted, adopt
from belayer.gpu.plugin.memory import Memory

_log = logging.getLogger("belayer")


class Engine:
    """One scheduler process under Belayer; its methods are SGLang's hooks."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._phase: Literal["starting", "warming", "armed", "serving"] = "starting"
        self._ledger: Ledger | None = None
        self._written: dict[int, tuple[str, int]] = {}
        self._steps: deque[int] = deque()
        self._held: list[Any] = []
        self._arm_asked = False

    # --- the loop -----------------------------------------------------------------------------------------------

    def loop_starts(self, scheduler: Any) -> None:
        """Before Scheduler.run_event_loop: everything is built, nothing has been served."""
        memory = self._memory
        if memory.epoch:
            facts = self._take_over(scheduler, adopting=not memory.fresh)
            _log.info("belayer: main under epoch %d, %s", memory.epoch, facts)
            return
        self._phase = "warming"
        if scheduler.idle_sleeper is not None:
            import zmq

            scheduler.idle_sleeper.poller.register(memory.client.fileno(), zmq.POLLIN)

    def loop_turns(self, scheduler: Any, recv_reqs: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before Scheduler.process_input_requests, which every turn of the loop calls."""
        if self._phase == "serving":
            assert self._ledger is not None
            self._ledger.beat()
            return None
        if self._phase == "starting":
            return None
        self._follow_orders(scheduler)
        if self._phase == "warming":
            return None
        self._held += recv_reqs
        if self._phase == "armed":
            return (scheduler, []), {}
        released, self._held = self._held, []
        return (scheduler, released), {}

    def _follow_orders(self, scheduler: Any) -> None:
        received = self._memory.client.order()
        if received is not None:
            order, fds = received
            if isinstance(order, wire.ArmNow):
                self._arm_asked = True
            else:
                self._handover(scheduler, order, fds)
        if self._arm_asked and self._phase == "warming" and scheduler.is_fully_idle():
            self._arm_asked = False
            self._arm(scheduler)

    def _arm(self, scheduler: Any) -> None:
        began_s = time.monotonic()
        scheduler.flush_cache()
        self._memory.drop_scratch()
        self._phase = "armed"
        self._memory.client.tell(wire.Done({"arm_s": time.monotonic() - began_s, **_device_memory(scheduler)}))
        _log.info("belayer: armed")

    def _handover(self, scheduler: Any, granted: wire.Granted, fds: list[int]) -> None:
        began_s = time.monotonic()
        self._memory.map_granted(granted, fds)
        mapped_s = time.monotonic()
        facts = self._take_over(scheduler, adopting=granted.adopt)
        done_s = time.monotonic()
        self._memory.client.tell(
            wire.Done({"map_s": mapped_s - began_s, "adopt_s": done_s - mapped_s, **facts, "granted_at_s": began_s})
        )
        _log.info("belayer: main under epoch %d, mapped in %.4f s, %s", granted.epoch, mapped_s - began_s, facts)

    def _take_over(self, scheduler: Any, *, adopting: bool) -> dict[str, float]:
        """Adopt what the last holder proved, then write the ledger under our own epoch."""
        memory = self._memory
        assert memory.ledger is not None and memory.slot_table is not None
        ledger = memory.ledger
        adopting = adopting and scheduler.ps.tp_size == 1
        entries: list[Entry] = list(ledger.proven(ledger.epoch)) if adopting else []
        ledger.begin(memory.epoch)
        adopted = Adopted(0, 0)
        if entries:
            adopted = adopt(scheduler.tree_cache, scheduler.token_to_kv_pool_allocator, memory.slot_table, entries)
        self._ledger = ledger
        self._phase = "serving"
        return {"adopted_tokens": adopted.tokens, "adopted_requests": adopted.requests}

    # --- the ledger ---------------------------------------------------------------------------------------------

    def step_begins(self, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
        """Before Scheduler.run_batch."""
        if self._ledger is not None:
            tokens = int(batch.extend_num_tokens or 0) if batch.forward_mode.is_extend() else len(batch.reqs)
            self._steps.append(tokens)
            self._ledger.begin_step(tokens)
        self._memory.weights_are_used()

    def step_ended(self, result: None, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
        """After Scheduler.process_batch_result: the sampled tokens are on the host, so the KV before them is there."""
        ledger = self._ledger
        if ledger is None:
            return
        written = self._written
        version = self._memory.weight_version
        for request in batch.reqs:
            row = request.req_pool_idx
            output = request.output_ids
            if row is None or not output or request.extra_key is not None:
                continue
            prompt = request.origin_input_ids
            total = len(prompt) + len(output)
            known = written.get(row)
            if known is None or known[0] != request.rid:
                if total <= ledger.width:
                    ledger.write(row, request_digest(request.rid), 0, prompt + output, version)
                    written[row] = (request.rid, total)
            elif known[1] < total <= ledger.width:
                ledger.write(row, request_digest(request.rid), known[1], output[known[1] - len(prompt) :], version)
                written[row] = (request.rid, total)
        ledger.end_step(self._steps.popleft() if self._steps else 0)

    def row_freed(self, pool: Any, request: Any) -> None:
        """Before ReqToTokenPool.free: from here on the row's slots may be given to another request."""
        row = request.req_pool_idx
        if self._ledger is not None and row is not None:
            self._ledger.invalidate(row)
            self._written.pop(row, None)

    def rows_cleared(self, pool: Any) -> None:
        """Before ReqToTokenPool.clear."""
        if self._ledger is not None:
            self._ledger.invalidate_all()
            self._written.clear()


def _device_memory(scheduler: Any) -> dict[str, float]:
    """What this process's own tensors take on the device (not its context, its modules or what is lent to it)."""
    if scheduler.device != "cuda":
        return {}
    import torch

    return {"torch_reserved_gb": torch.cuda.memory_reserved() / 1e9}
