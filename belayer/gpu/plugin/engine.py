"""The scheduler's side: the ledger at each step, a shadow that waits, and the moment when it takes over.

A shadow serves its warm-up requests on scratch. Armed, it holds every request that comes, in order, until it is
granted the lease; then it adopts what the last holder proved and lets the requests in. They run once it may write,
which may be later. All of it happens in the scheduler's own thread, between two turns of its loop: nothing else
touches its tree or its allocator; only the driver's change of access is made beside (belayer/gpu/plugin/unlock.py).
Tensor parallel ranks all do it in the same turn (belayer/gpu/plugin/ranks.py).
"""

from __future__ import annotations

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false
import logging
import os
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from zlib import crc32

from belayer.gpu import wire
from belayer.gpu.fatal_signals import die_at_once
from belayer.gpu.http_engine import WEIGHT_VERSIONS_KEY
from belayer.gpu.huge_pages import collapse
from belayer.gpu.ledger import Entry, Ledger
from belayer.gpu.plugin.adoption import adopt
from belayer.gpu.plugin.cache import Cache
from belayer.gpu.plugin.known import refuse_unknown
from belayer.gpu.plugin.link import Link
from belayer.gpu.plugin.orders import Orders
from belayer.gpu.plugin.ranks import Claim, Lead, agree
from belayer.gpu.plugin.rehearsal import rehearse
from belayer.gpu.plugin.resume import Resumption
from belayer.gpu.plugin.rows import Rows
from belayer.gpu.plugin.slots import Slots
from belayer.gpu.plugin.unlock import Unlock
from belayer.gpu.plugin.weights import Weights

_log = logging.getLogger("belayer")
_STEPS_WITHOUT_RELEASE = 16
"""A new main takes over early only if its predecessor's reserve lasts for so many tokens of each request."""
_GATHER_S, _QUIET_S = 0.06, 0.005
"""After a handover the first batch waits so long for all resuming requests, or so long after the last that came."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What a rank finds at a handover."""

    weight_version: int
    quarantined: bool
    writable: bool
    reserve: int
    claims: list[Claim]


class Engine:
    """One scheduler process under Belayer; its methods are SGLang's hooks."""

    def __init__(self, link: Link, weights: Weights, cache: Cache) -> None:
        self._link = link
        self._weights = weights
        self._cache = cache
        self._orders = Orders(link, cache.follow)
        self._scheduler: Any = None
        self._phase: Literal["starting", "warming", "armed", "waiting", "serving"] = "starting"
        self._ledger: Ledger | None = None
        self._slots: Slots | None = None
        self._resumption = Resumption()
        self._rows = Rows()
        self._steps: deque[tuple[int, int]] = deque()
        """Launched and not processed: their tokens to prefill, and the version of the weights that they run with."""
        self._step_version = 0
        self._held: list[Any] = []
        self._unlock = Unlock()
        self._unlocks = False
        """All ranks have been let write: what is waited for is the driver alone."""
        self._release_is_due = False
        """Our memory server has yet to say that the last holder on this device is dead."""
        self._adopted_s = 0.0
        self._facts: dict[str, float] = {}
        self._served_s = 0.0
        self._gathering = False
        self._decoding = False

    # --- the loop -----------------------------------------------------------------------------------------------

    def loop_starts(self, scheduler: Any) -> None:
        """Before Scheduler.run_event_loop: everything is built, nothing has been served."""
        refuse_unknown(scheduler.server_args)
        die_at_once()
        collapse()
        self._scheduler = scheduler
        self._slots = Slots(scheduler.tree_cache, scheduler.token_to_kv_pool_allocator)
        if self._cache.epoch:
            self._facts, _ = self._take_over(scheduler, adopting=True, quarantined=False, writable=True)
            self._serve()
        else:
            self._phase = "warming"
        if scheduler.idle_sleeper is not None:
            import zmq

            scheduler.idle_sleeper.poller.register(self._link.client.fileno(), zmq.POLLIN)
            scheduler.idle_sleeper.poller.register(self._unlock.fileno(), zmq.POLLIN)

    def requests_are_pulled(self, original: Callable[..., Any], receiver: Any) -> Any:
        """Around the reception of requests, of which only rank 0 has any; it adds what all ranks are to do."""
        requests = original(receiver)
        if requests is not None and self._phase != "starting" and (what := self._is_due()):
            requests.append(Lead(what))
        return requests

    def _is_due(self) -> Literal["arm", "granted", "unlocked", "released", "gathered"] | None:
        assert self._slots is not None
        orders, serving = self._orders, self._phase == "serving"
        if serving and not self._slots.quarantined:
            return "gathered" if self._gathering and self._has_gathered() else None
        orders.look()
        if self._phase == "warming":
            return "arm" if orders.has(wire.ArmNow) and self._scheduler.is_fully_idle() else None
        if self._phase == "armed":
            return "granted" if orders.has(wire.Granted) else None
        if self._phase == "waiting" and self._unlocks:
            return "unlocked" if self._unlock.is_done else None
        if orders.has(wire.Released) or not self._release_is_due:
            return "released"
        return "gathered" if serving and self._gathering and self._has_gathered() else None

    def loop_turns(self, scheduler: Any, recv_reqs: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before Scheduler.process_input_requests, which every turn of the loop calls."""
        if self._phase == "starting":
            return None
        if self._ledger is not None:
            self._ledger.beat()
        if self._phase == "armed":
            self._orders.look()
        requests = [request for request in recv_reqs if not isinstance(request, Lead)]
        for lead in recv_reqs if len(requests) < len(recv_reqs) else ():
            if isinstance(lead, Lead):
                self._do(scheduler, lead)
        if self._phase == "armed":
            self._held += requests
            return (scheduler, []), {}
        if self._held:
            requests, self._held = self._held + requests, []
        return (scheduler, self._resumption.completed(scheduler, requests)), {}

    def _do(self, scheduler: Any, lead: Lead) -> None:
        match lead.what:
            case "arm":
                self._arm(scheduler, self._orders.take(wire.ArmNow)[1][0])
            case "granted":
                self._handover(scheduler, *self._orders.take(wire.Granted))
            case "unlocked":
                self._serve()
            case "released":
                self._released()
            case "gathered":
                self._gathering = False

    def _arm(self, scheduler: Any, kv_fd: int) -> None:
        began_s = time.monotonic()
        scheduler.flush_cache()
        assert self._slots is not None
        tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
        rehearse(self._slots, tree, allocator, scheduler.req_to_token_pool.req_to_token, self._link.ranks)
        scheduler.flush_cache()
        self._cache.drop_scratch(kv_fd)
        in_huge_pages = collapse()
        self._phase = "armed"
        facts = {"arm_s": time.monotonic() - began_s, "huge_pages_gb": in_huge_pages / 1e9}
        self._link.client.tell(wire.Armed(facts | _device_memory(scheduler)))
        _log.info("belayer: armed")

    # --- the handover -------------------------------------------------------------------------------------------

    def _handover(self, scheduler: Any, granted: wire.Granted, fds: list[int]) -> None:
        began_s = time.monotonic()
        cache = self._cache
        cache.epoch, cache.last_epoch = granted.epoch, granted.last_epoch
        self._weights.version = granted.weights_version
        if granted.follow:
            cache.follow(fds[-2:])
        if granted.writable:
            self._unlock.begin(lambda: cache.may_write(fds[0]))
        mapped_s = time.monotonic()
        self._facts, self._unlocks = self._take_over(
            scheduler, adopting=granted.adopt, quarantined=granted.quarantined, writable=granted.writable
        )
        self._adopted_s = time.monotonic()
        self._facts |= {"map_s": mapped_s - began_s, "adopt_s": self._adopted_s - mapped_s}

    def _released(self) -> None:
        """The last holder is dead, on every rank."""
        self._await_release()
        if self._phase == "waiting":
            self._serve()
        else:
            self._end_quarantine()

    def _await_release(self) -> None:
        """Wait until the last holder on this device is dead, and let the KV be written if it is not yet."""
        if not self._release_is_due:
            return
        released, fds = self._orders.take(wire.Released)
        self._release_is_due = False
        if released.writable:
            self._facts["wait_s"] = time.monotonic() - self._adopted_s
            self._unlock.begin(lambda: self._cache.may_write(fds[0]))

    def _serve(self) -> None:
        began_s = time.monotonic()
        driver_s = self._unlock.wait()
        self._phase, self._unlocks = "serving", False
        self._served_s = time.monotonic()
        self._facts |= {"unlock_s": self._served_s - began_s, "driver_s": driver_s}
        self._link.client.tell(wire.Serving(self._facts))
        _log.info("belayer: main under epoch %d, %s", self._cache.epoch, self._facts)

    def _take_over(
        self, scheduler: Any, *, adopting: bool, quarantined: bool, writable: bool
    ) -> tuple[dict[str, float], bool]:
        """Adopt what the last holder proved, and write the ledger under our own epoch. Writes no KV.

        Also returns whether all ranks may write.
        """
        cache, tree, allocator = self._cache, scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
        assert cache.ledger is not None and self._slots is not None
        slots, ranks = self._slots, self._link.ranks
        began_s = time.monotonic()
        entries: list[Entry] = []
        reserved, table = array("q"), scheduler.req_to_token_pool.req_to_token
        if (last_holder := cache.last_holder()) is not None:
            last, table = last_holder
            entries = list(last.proven(cache.last_epoch)) if adopting else []
            reserved = last.reserved(cache.last_epoch)
        read_s = time.monotonic()
        claims = [Claim.of(entry) for entry in entries] if ranks.size > 1 else []
        said = ranks.all_say(_Found(self._weights.version, quarantined, writable, crc32(reserved.tobytes()), claims))
        if len(versions := {one.weight_version for one in said}) > 1:
            _log.error("belayer: the ranks have weights of versions %s: this engine ends", sorted(versions))
            os._exit(4)
        if len({one.reserve for one in said}) > 1:
            reserved = array("q")
        entries = agree([one.claims for one in said], entries)
        self._release_is_due = quarantined or not writable
        quarantined, may_write = any(one.quarantined for one in said), all(one.writable for one in said)
        agreed_s = time.monotonic()
        if quarantined and len(reserved) < _STEPS_WITHOUT_RELEASE * max(1, len(entries)):
            self._await_release()
            quarantined = False
        adopted, free = adopt(tree, allocator, table, entries, reserved, ranks)
        if adopted.tokens or quarantined:
            slots.lay_out(free, reserved if quarantined else None)
        tree_s = time.monotonic()
        cache.ledger.begin(cache.epoch)
        self._ledger = cache.ledger
        if not quarantined:
            cache.ledger.reserve(slots.keep_reserve())
        self._resumption.learn(entries if adopted.tokens else ())
        self._phase, self._gathering = "waiting", True
        facts = {"read_s": read_s - began_s, "agree_s": agreed_s - read_s, "tree_s": tree_s - agreed_s}
        facts |= {"adopted_tokens": adopted.tokens, "adopted_requests": adopted.requests, "early": float(quarantined)}
        return facts, may_write

    def _end_quarantine(self) -> None:
        """Set a reserve of our own aside for whoever comes next."""
        assert self._slots is not None and self._ledger is not None
        self._slots.release_quarantine()
        self._ledger.reserve(self._slots.keep_reserve())

    # --- the ledger ---------------------------------------------------------------------------------------------

    def step_begins(self, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
        """Before Scheduler.run_batch. What is to be run is ready; nothing of it runs before the KV may be written."""
        if self._phase == "waiting":
            self._serve() if self._unlocks else self._released()
        self._gathering = False
        self._weights.are_used()
        if self._ledger is not None:
            tokens = int(batch.extend_num_tokens or 0) if batch.forward_mode.is_extend() else 0
            self._steps.append((tokens, self._weights.version))
            self._ledger.begin_step(tokens)
            if self._served_s:
                self._say_soon(f"a batch of {len(batch.reqs)}")

    def step_ends(self, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
        """Before Scheduler.process_batch_result."""
        self._decoding = batch.forward_mode.is_decode()
        self._step_version = self._steps[0][1] if self._steps else self._weights.version

    def step_ended(self, result: None, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
        """After Scheduler.process_batch_result."""
        self._decoding = False
        if self._ledger is not None:
            self._ledger.end_step(self._steps.popleft()[0] if self._steps else 0)

    def tokens_go_out(self, streamer: Any, requests: list[Any], *_: Any, **__: Any) -> None:
        """Before the output streamer: the tokens are sampled."""
        self._say_versions(requests)
        if self._ledger is None or not self._decoding:
            return
        if self._served_s:
            self._say_soon(f"tokens of {len(requests)}")
            self._served_s = 0.0
        self._rows.decoded(self._ledger, requests, self._step_version)

    def _say_versions(self, requests: list[Any]) -> None:
        """Each token goes out with the version of the weights that it came from (in its request's meta_info)."""
        for request in requests:
            if request.customized_info is None:
                request.customized_info = {}
            versions = request.customized_info.setdefault(WEIGHT_VERSIONS_KEY, [])
            versions += [self._step_version] * (len(request.output_ids) - len(versions))

    def _say_soon(self, what: str) -> None:
        """For the log: what is done first after a handover, and how soon."""
        _log.info("belayer: %s, %.4f s after it served", what, time.monotonic() - self._served_s)

    def row_freed(self, pool: Any, request: Any) -> None:
        """Before ReqToTokenPool.free: from here on the row's slots may be given to another request."""
        row = request.req_pool_idx
        if self._ledger is not None and row is not None:
            self._rows.freed(self._ledger, row)

    def rows_cleared(self, pool: Any) -> None:
        """Before ReqToTokenPool.clear."""
        if self._ledger is not None:
            self._rows.cleared(self._ledger)

    # --- the rest -----------------------------------------------------------------------------------------------

    def prefill_is_chosen(
        self, original: Callable[..., Any], scheduler: Any, *, running_batch: Any, **named: Any
    ) -> Any:
        """Around the choice of the next prefill: requests that need none join the decode batch first.

        After a handover the first batch is all that were running: one that comes while a step runs waits for its end.
        """
        if self._gathering and not self._resumption.all_came:
            return None, running_batch
        return original(scheduler, running_batch=self._resumption.join(scheduler, running_batch), **named)

    def _has_gathered(self) -> bool:
        """By rank 0's clock."""
        now_s = time.monotonic()
        return now_s - self._served_s > _GATHER_S or now_s - self._resumption.came_s > _QUIET_S

    def cache_flushed(self, original: Callable[..., bool], scheduler: Any, *arguments: Any, **named: Any) -> bool:
        """Around Scheduler.flush_cache: what is set aside does not outlive the tree, and is set aside again."""
        if self._slots is None or self._ledger is None:
            return original(scheduler, *arguments, **named)
        if self._slots.quarantined:
            self._await_release()
            self._end_quarantine()
        self._ledger.reserve(())
        flushed = original(scheduler, *arguments, **named)
        if flushed:
            self._slots.forget()
            self._ledger.reserve(self._slots.keep_reserve())
            self._weights.ended()
        return flushed

    def generation_continues(self, scheduler: Any, *_: Any) -> None:
        """Before Scheduler.continue_generation, with which callers that may not flush the cache end an update."""
        self._weights.ended()

    def weights_updated(self, original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
        """Around SGLang's weight updates; the loop is silent for as long as one takes."""
        if self._ledger is None:
            from sglang.srt.managers import io_struct

            answer = getattr(io_struct, type(recv_req).__name__.replace("Input", "Output"))
            return answer(success=False, message="this engine is a shadow: it has the weights that its main is given")
        self._ledger.excuse(True)
        try:
            return self._weights.update(original, manager, recv_req)
        finally:
            self._ledger.excuse(False)


def _device_memory(scheduler: Any) -> dict[str, float]:
    """What this process's own tensors take on the device (not its context, its modules or what is lent to it)."""
    if scheduler.device != "cuda":
        return {}
    import torch

    return {"torch_reserved_gb": torch.cuda.memory_reserved() / 1e9}
