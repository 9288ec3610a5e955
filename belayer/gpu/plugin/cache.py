"""An engine's KV buffers and slot table lie in the memory server's arena, at fixed addresses.

One range of addresses: the slot table, the KV buffers, and room for the last holder's slot table. A main maps its
lease there; a shadow backs it with scratch, captures its CUDA graphs over that, and maps its lease when it is granted.

Invariant: the tensors always have the addresses and shapes that the server knows; an engine whose shapes differ is
refused before it maps anything.
"""

from __future__ import annotations

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false
import logging
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from belayer.gpu import wire
from belayer.gpu.arena import KV_ADDRESS, Allocation, round_up
from belayer.gpu.errors import UnsupportedEngineError
from belayer.gpu.ledger import Ledger, ledger_bytes
from belayer.gpu.plugin.link import Link

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("belayer")
_ANY_BYTES = 1 << 50


class Cache:
    """The KV cache of one engine process; its methods are SGLang's hooks, and what the engine does with the lease."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.epoch = 0
        self.fresh = True
        self.ledger: Ledger | None = None
        self._last_ledger: Ledger | None = None
        self._last_table: Allocation | None = None
        self._pool: Any = None
        self._kv_bytes = 0
        self._table_bytes = 0
        self._table_shape = (0, 0)

    # --- hooks --------------------------------------------------------------------------------------------------

    def available_bytes(self, original: Callable[..., int], *arguments: Any, **named: Any) -> int:
        """Around the measurement of free memory: what the server has already is not to be measured again."""
        return original(*arguments, **named) if self._link.arena is None else _ANY_BYTES

    def token_capacity(self, original: Callable[..., int], configurator: Any, token_capacity: int) -> int:
        """Around SGLang's choice of the KV cache's size: the server's, when it has one."""
        arena = self._link.arena
        return original(configurator, token_capacity) if arena is None else int(arena.spec["tokens"])

    def slot_table_made(self, result: None, pool: Any, *_: Any, **__: Any) -> None:
        """After ReqToTokenPool's constructor: its table moves into the arena when the KV buffers are made."""
        if type(pool).__name__ != "ReqToTokenPool":
            raise UnsupportedEngineError("the slot table", type(pool).__name__, "ReqToTokenPool")
        self._pool = pool

    def kv_buffers(self, original: Callable[..., Any], pool: Any, *_: Any, **__: Any) -> None:
        """Around MHATokenToKVPool._create_buffers_normal: its buffers lie in the arena."""
        if type(pool).__name__ != "MHATokenToKVPool" or pool.kv_cache_layout != "nhd" or self._pool is None:
            raise UnsupportedEngineError(
                "the KV cache", f"{type(pool).__name__} ({pool.kv_cache_layout})", "MHATokenToKVPool (nhd)"
            )
        mapper = self._link.mapper(pool.device)
        step = mapper.granularity_bytes
        k_shape, v_shape = pool._kv_buffer_shapes()
        k_bytes = round_up(math.prod(k_shape) * pool.store_dtype.itemsize, step)
        v_bytes = round_up(math.prod(v_shape) * pool.store_dtype.itemsize, step)
        table = self._pool.req_to_token
        rows, width = self._table_shape = table.shape
        self._table_bytes = round_up(table.numel() * table.element_size(), step)
        self._kv_bytes = pool.layer_num * (k_bytes + v_bytes)
        spec: wire.Spec = {
            "layers": pool.layer_num,
            "kv_heads": pool.head_num,
            "head_dim": pool.head_dim,
            "v_head_dim": pool.v_head_dim,
            "dtype": str(pool.store_dtype),
            "tokens": pool.size,
            "page_size": pool.page_size,
            "table_rows": rows,
            "table_width": width,
        }
        request = wire.OpenArena(spec, self._kv_bytes, self._table_bytes, ledger_bytes(rows, width))
        lent, fds = self._link.client.ask(request, wire.ArenaLent)
        self.epoch, self.fresh = lent.epoch, lent.fresh
        mapper.reserve(KV_ADDRESS, self._kv_bytes + 2 * self._table_bytes)
        if lent.epoch:
            self._map_lease(fds)
        else:
            mapper.map_scratch(KV_ADDRESS, self._table_bytes + self._kv_bytes, self._table_bytes)
        at = KV_ADDRESS + self._table_bytes
        pool.k_buffer, pool.v_buffer = [], []
        for _layer in range(pool.layer_num):
            pool.k_buffer.append(mapper.tensor(at, k_shape, pool.store_dtype))
            pool.v_buffer.append(mapper.tensor(at + k_bytes, v_shape, pool.store_dtype))
            at += k_bytes + v_bytes
        self._pool.req_to_token = self._table_at(KV_ADDRESS)
        if lent.epoch:
            self._pool.req_to_token.zero_()
        if lent.epoch and lent.fresh:
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer.zero_()
        _log.info("belayer: KV arena %.3f GB, %s", self._kv_bytes / 1e9, "lent" if lent.epoch else "on scratch")

    # --- the lease ----------------------------------------------------------------------------------------------

    def drop_scratch(self) -> None:
        """A shadow is warm: its addresses go back to being empty until the lease comes."""
        self._link.mapper().unmap(KV_ADDRESS, self._table_bytes + self._kv_bytes)

    def map_granted(self, epoch: int, fds: list[int]) -> None:
        """The lease has come: map it where the scratch was. The slot table starts empty."""
        self.epoch, self.fresh = epoch, False
        self._map_lease(fds)
        self._pool.req_to_token.zero_()

    def last_holder(self) -> tuple[Ledger, torch.Tensor]:
        """The last holder's ledger and slot table, to read until they are let go."""
        assert self._last_ledger is not None and self._last_table is not None
        return self._last_ledger, self._table_at(self._last_table_address)

    def let_go_of_last(self) -> None:
        """Unmap what the last holder left. Not while it is dying: the driver would make us wait for its teardown."""
        mapper = self._link.mapper()
        if self._last_table is not None and self._last_ledger is not None:
            mapper.unmap(self._last_table_address, self._table_bytes)
            mapper.forget(self._last_table)
            self._last_ledger.close()
            self._last_table = self._last_ledger = None

    @property
    def _last_table_address(self) -> int:
        return KV_ADDRESS + self._table_bytes + self._kv_bytes

    def _map_lease(self, fds: list[int]) -> None:
        mapper = self._link.mapper()
        kv_fd, table_fd, ledger_fd, last_table_fd, last_ledger_fd = fds
        mapper.map(KV_ADDRESS, mapper.take(table_fd, self._table_bytes), writable=True)
        mapper.map(KV_ADDRESS + self._table_bytes, mapper.take(kv_fd, self._kv_bytes), writable=True)
        self._last_table = mapper.take(last_table_fd, self._table_bytes)
        mapper.map(self._last_table_address, self._last_table, writable=False)
        self.ledger = Ledger(ledger_fd, *self._table_shape)
        self._last_ledger = Ledger(last_ledger_fd, *self._table_shape, writable=False)
        os.close(ledger_fd)
        os.close(last_ledger_fd)

    def _table_at(self, address: int) -> torch.Tensor:
        import torch

        return self._link.mapper().tensor(address, self._table_shape, torch.int32)
