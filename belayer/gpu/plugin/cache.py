"""An engine's KV buffers and slot table lie in the memory server's arena, at fixed addresses.

One range of addresses: the slot table, the KV buffers, and room for the last holder's slot table. The slot table is
the engine's own from the start. A main maps the KV to write; a shadow backs its addresses with scratch, captures its
CUDA graphs over that, and once armed has the KV mapped to read, until it may write.

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
        self.last_epoch = 0
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
        return original(*arguments, **named) if self._link.tokens is None else _ANY_BYTES

    def token_capacity(self, original: Callable[..., int], configurator: Any, token_capacity: int) -> int:
        """Around SGLang's choice of the KV cache's size: the server's, when it has one."""
        tokens = self._link.tokens
        return original(configurator, token_capacity) if tokens is None else tokens

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
        self.epoch, self.last_epoch = lent.epoch, lent.last_epoch
        mapper.reserve(KV_ADDRESS, self._kv_bytes + 2 * self._table_bytes)
        table_fd, ledger_fd, *lease = fds
        mapper.map(KV_ADDRESS, mapper.take(table_fd, self._table_bytes), writable=True)
        self.ledger = Ledger(ledger_fd, *self._table_shape)
        os.close(ledger_fd)
        if lent.epoch:
            mapper.map(self._kv_address, mapper.take(lease.pop(0), self._kv_bytes), writable=True)
        else:
            mapper.map_scratch(self._kv_address, self._kv_bytes)
        if lent.last_epoch:
            self.follow(lease)
        at = self._kv_address
        pool.k_buffer, pool.v_buffer = [], []
        for _layer in range(pool.layer_num):
            pool.k_buffer.append(mapper.tensor(at, k_shape, pool.store_dtype))
            pool.v_buffer.append(mapper.tensor(at + k_bytes, v_shape, pool.store_dtype))
            at += k_bytes + v_bytes
        self._pool.req_to_token = self._table_at(KV_ADDRESS)
        self._pool.req_to_token.zero_()
        if lent.epoch and not lent.last_epoch:
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer.zero_()
        _log.info("belayer: KV arena %.3f GB, %s", self._kv_bytes / 1e9, "lent" if lent.epoch else "on scratch")

    # --- the lease ----------------------------------------------------------------------------------------------

    def drop_scratch(self, kv_fd: int) -> None:
        """A shadow is warm: the KV, which it may only read, takes the scratch's place."""
        mapper = self._link.mapper()
        mapper.unmap(self._kv_address, self._kv_bytes)
        mapper.map(self._kv_address, mapper.take(kv_fd, self._kv_bytes), writable=False)

    def may_write(self, kv_fd: int) -> None:
        """The lease is ours to write."""
        self._link.mapper().protect(self._kv_address, kv_fd, self._kv_bytes, writable=True)

    def follow(self, fds: list[int]) -> None:
        """Map the slot table and ledger of the last holder, or of the one that will be it.

        They stay mapped: unmapping them would make a new main wait for the driver.
        """
        mapper = self._link.mapper()
        if self._last_table is not None and self._last_ledger is not None:
            mapper.unmap(self._last_table_address, self._table_bytes)
            mapper.forget(self._last_table)
            self._last_ledger.close()
        table_fd, ledger_fd = fds
        self._last_table = mapper.take(table_fd, self._table_bytes)
        mapper.map(self._last_table_address, self._last_table, writable=False)
        self._last_ledger = Ledger(ledger_fd, *self._table_shape, writable=False)
        os.close(ledger_fd)

    def last_holder(self) -> tuple[Ledger, torch.Tensor] | None:
        """The last holder's ledger and slot table; None when there was none."""
        if not self.last_epoch or self._last_ledger is None:
            return None
        return self._last_ledger, self._table_at(self._last_table_address)

    @property
    def _kv_address(self) -> int:
        return KV_ADDRESS + self._table_bytes

    @property
    def _last_table_address(self) -> int:
        return KV_ADDRESS + self._table_bytes + self._kv_bytes

    def _table_at(self, address: int) -> torch.Tensor:
        import torch

        return self._link.mapper().tensor(address, self._table_shape, torch.int32)
