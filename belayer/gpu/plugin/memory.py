"""Where an engine's weights, KV buffers and slot table lie: in the memory server's arena, at fixed addresses.

The first engine loads its weights as SGLang always does, copies them into the arena and drops its own; later engines
build the model without memory and map. The KV buffers and the slot table are one allocation, the table first. A main
maps it under its lease; a shadow backs the same addresses with scratch until it is granted the lease.

Invariant: the engine's tensors always have the addresses and shapes that the server knows; an engine whose shapes
differ is refused before it maps anything.
"""

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import gc
import hashlib
import logging
import math
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from belayer.gpu import wire
from belayer.gpu.arena import KV_ADDRESS, WEIGHTS_ADDRESS, Allocation, ArenaMapper, open_mapper, round_up
from belayer.gpu.errors import UnsupportedEngineError
from belayer.gpu.ledger import Ledger, ledger_bytes
from belayer.gpu.memory_client import MemoryClient

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("belayer")
_TENSOR_ALIGNMENT_BYTES = 512
_ANY_BYTES = 1 << 50


class Memory:
    """One engine process's arena. Connects when the model is loaded, in the scheduler process only."""

    def __init__(self, socket_path: str, incarnation: str, role: wire.Role) -> None:
        self.socket_path = socket_path
        self.incarnation = incarnation
        self.role: wire.Role = role
        self.epoch = 0
        self.fresh = True
        self.weight_version = 0
        self.ledger: Ledger | None = None
        self.slot_table: torch.Tensor | None = None
        self._client: MemoryClient | None = None
        self._mapper: ArenaMapper | None = None
        self._known_arena: wire.Region | None = None
        self._pool: Any = None
        self._arena_bytes = 0
        self._ledger_shape = (0, 0)
        self._weights_reader: Allocation | None = None
        self._update: _Update | None = None

    @classmethod
    def from_environment(cls) -> Memory:
        """BELAYER_MEMORY_SOCKET, BELAYER_INCARNATION and BELAYER_ROLE, as the engine's launcher sets them."""
        role: wire.Role = "shadow" if os.environ.get("BELAYER_ROLE") == "shadow" else "main"
        return cls(
            os.environ["BELAYER_MEMORY_SOCKET"], os.environ.get("BELAYER_INCARNATION", f"pid-{os.getpid()}"), role
        )

    @property
    def client(self) -> MemoryClient:
        if self._client is None:
            path = self.socket_path.replace("{rank}", str(_tensor_parallel_rank()))
            self._client, registered = MemoryClient.connect(path, self.incarnation, self.role, timeout_s=600.0)
            self._known_arena = registered.arena
        return self._client

    def mapper(self, device: str) -> ArenaMapper:
        if self._mapper is None:
            self._mapper = open_mapper(device)
        return self._mapper

    # --- weights ------------------------------------------------------------------------------------------------

    def model_loader(self, original: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:
        """Around SGLang's get_model_loader: the same loader, whose load_model puts the weights into the arena."""
        loader = original(load_config, model_config)
        memory = self

        class ArenaLoader(type(loader)):  # type: ignore[misc]
            def load_model(self, *, model_config: Any, device_config: Any) -> Any:
                return memory.load(self, super().load_model, model_config, device_config)

        loader.__class__ = ArenaLoader
        return loader

    def load(self, loader: Any, load_model: Callable[..., Any], model_config: Any, device_config: Any) -> Any:
        """Return the model with every parameter and buffer in the arena."""
        import torch

        began_s = time.monotonic()
        device = _device_name(device_config.device, getattr(device_config, "gpu_id", None))
        mapper = self.mapper(device)
        model = _build_without_memory(loader, model_config)
        layout = _Layout(model)
        answer, fds = self.client.ask(wire.OpenWeights(layout.spec, layout.size_bytes), wire.WeightsLent)
        if answer.writable:
            model = load_model(model_config=model_config, device_config=device_config)
            loaded = _Layout(model)
            if loaded.spec != layout.spec:
                raise UnsupportedEngineError(
                    "the model after loading", "of another layout than before it", "models whose loading keeps shapes"
                )
            layout = loaded
        allocation = mapper.take(fds[0], answer.size_bytes)
        mapper.reserve(WEIGHTS_ADDRESS, answer.size_bytes)
        mapper.map(WEIGHTS_ADDRESS, allocation, writable=answer.writable)
        layout.move(mapper, WEIGHTS_ADDRESS, copy=answer.writable)
        self.weight_version = answer.version
        self._weights_reader = allocation
        if answer.writable:
            mapper.synchronize()
            committed, fds = self.client.ask(wire.CommitWeights(0), wire.WeightsLent)
            self._read_weights(allocation, mapper.take(fds[0], committed.size_bytes))
            gc.collect()
            if device != "cpu":
                torch.cuda.empty_cache()
        _log.info(
            "belayer: weights %s, %.3f GB, version %d, in %.3f s",
            "loaded into the arena" if answer.writable else "mapped",
            answer.size_bytes / 1e9,
            self.weight_version,
            time.monotonic() - began_s,
        )
        return model.eval()

    def begin_update(self, version: int | None) -> None:
        """Make the weights writable in place, as that version or the next. Until the commit they count as torn."""
        assert self._mapper is not None
        if self._update is None:
            version = self.weight_version + 1 if version is None else version
            answer, fds = self.client.ask(wire.BeginWeights(version), wire.WeightsLent)
            writable = self._mapper.take(fds[0], answer.size_bytes)
            self._mapper.protect(WEIGHTS_ADDRESS, writable, writable=True)
            self._update = _Update(version, writable)
        elif version is not None:
            self._update.version = version
        self._update.failed = False

    def update_failed(self) -> None:
        """A call of the update failed: the weights may be half written, and stay uncommitted."""
        if self._update is not None:
            self._update.failed = True

    def commit_update(self) -> None:
        """The version is complete: read only again, for every engine."""
        assert self._mapper is not None and self._update is not None
        update, self._update = self._update, None
        self._mapper.synchronize()
        answer, fds = self.client.ask(wire.CommitWeights(update.version), wire.WeightsLent)
        self._read_weights(update.writable, self._mapper.take(fds[0], answer.size_bytes))
        self.weight_version = update.version

    def weights_are_used(self) -> None:
        """A forward pass begins: weights that were updated and not yet committed are what is served from here on."""
        if self._update is not None and not self._update.failed:
            self.commit_update()

    def _read_weights(self, writable: Allocation, readable: Allocation) -> None:
        assert self._mapper is not None
        self._mapper.protect(WEIGHTS_ADDRESS, readable, writable=False)
        self._mapper.forget(writable)
        if self._weights_reader is not None and self._weights_reader != writable:
            self._mapper.forget(self._weights_reader)
        self._weights_reader = readable

    # --- KV cache and slot table --------------------------------------------------------------------------------

    def slot_table_made(self, result: None, pool: Any, *_: Any, **__: Any) -> None:
        """After ReqToTokenPool's constructor: its table moves into the arena when the KV buffers are made."""
        if type(pool).__name__ != "ReqToTokenPool":
            raise UnsupportedEngineError("the slot table", type(pool).__name__, "ReqToTokenPool")
        self._pool = pool

    def kv_buffers(self, original: Callable[..., Any], pool: Any, *_: Any, **__: Any) -> None:
        """Around MHATokenToKVPool._create_buffers_normal: its buffers lie in the arena."""
        import torch

        if type(pool).__name__ != "MHATokenToKVPool" or pool.kv_cache_layout != "nhd" or self._pool is None:
            raise UnsupportedEngineError(
                "the KV cache", f"{type(pool).__name__} ({pool.kv_cache_layout})", "MHATokenToKVPool (nhd)"
            )
        mapper = self.mapper(_device_name(pool.device, None))
        k_shape, v_shape = pool._kv_buffer_shapes()
        dtype = pool.store_dtype
        table = self._pool.req_to_token
        rows, width = table.shape
        step = mapper.granularity_bytes
        table_bytes = round_up(table.numel() * table.element_size(), step)
        k_bytes = round_up(math.prod(k_shape) * dtype.itemsize, step)
        v_bytes = round_up(math.prod(v_shape) * dtype.itemsize, step)
        self._arena_bytes = table_bytes + pool.layer_num * (k_bytes + v_bytes)
        self._ledger_shape = (rows, width)
        spec: dict[str, int | str] = {
            "layers": pool.layer_num,
            "kv_heads": pool.head_num,
            "head_dim": pool.head_dim,
            "v_head_dim": pool.v_head_dim,
            "dtype": str(dtype),
            "tokens": pool.size,
            "page_size": pool.page_size,
            "table_rows": rows,
            "table_width": width,
        }
        request = wire.OpenArena(spec, self._arena_bytes, ledger_bytes(rows, width))
        answer, fds = self.client.ask(request, wire.ArenaLent)
        self.epoch, self.fresh = answer.epoch, answer.fresh
        mapper.reserve(KV_ADDRESS, self._arena_bytes)
        if answer.epoch:
            self._map_arena(fds)
        else:
            mapper.map_scratch(KV_ADDRESS, self._arena_bytes, table_bytes)
        self.slot_table = table = mapper.tensor(KV_ADDRESS, (rows, width), torch.int32)
        at = KV_ADDRESS + table_bytes
        pool.k_buffer, pool.v_buffer = [], []
        for _layer in range(pool.layer_num):
            pool.k_buffer.append(mapper.tensor(at, k_shape, dtype))
            pool.v_buffer.append(mapper.tensor(at + k_bytes, v_shape, dtype))
            at += k_bytes + v_bytes
        if answer.epoch and answer.fresh:
            for buffer in (table, *pool.k_buffer, *pool.v_buffer):
                buffer.zero_()
        self._pool.req_to_token = table
        _log.info("belayer: KV arena %.3f GB, %s", self._arena_bytes / 1e9, "lent" if answer.epoch else "on scratch")

    def drop_scratch(self) -> None:
        """A shadow is warm: its addresses go back to being empty until the lease comes."""
        assert self._mapper is not None
        self._mapper.unmap(KV_ADDRESS, self._arena_bytes)

    def map_granted(self, granted: wire.Granted, fds: list[int]) -> None:
        """The lease has come: map the arena where the scratch was."""
        self.epoch, self.fresh = granted.epoch, False
        self._map_arena(fds)

    def _map_arena(self, fds: list[int]) -> None:
        assert self._mapper is not None
        arena_fd, ledger_fd = fds
        self._mapper.map(KV_ADDRESS, self._mapper.take(arena_fd, self._arena_bytes), writable=True)
        self.ledger = Ledger(ledger_fd, *self._ledger_shape)
        os.close(ledger_fd)

    def available_bytes(self, original: Callable[..., int], *arguments: Any, **named: Any) -> int:
        """Around the measurement of free memory: what the server has already is not to be measured again."""
        return _ANY_BYTES if self._known_arena is not None else original(*arguments, **named)

    def token_capacity(self, original: Callable[..., int], configurator: Any, token_capacity: int) -> int:
        """Around SGLang's choice of the KV cache's size: the server's, when it has one."""
        if self._known_arena is None:
            return original(configurator, token_capacity)
        return int(self._known_arena.spec["tokens"])


class _Update:
    """A weight update under way."""

    def __init__(self, version: int, writable: Allocation) -> None:
        self.version = version
        self.writable = writable
        self.failed = False


class _Layout:
    """Where each parameter and buffer of a model lies in the weights region. Shared tensors lie there once."""

    def __init__(self, model: Any) -> None:
        self._places: list[tuple[dict[str, Any], str, Any, int]] = []
        offsets: dict[int, int] = {}
        digest = hashlib.blake2b(digest_size=16)
        end = 0
        for module_name, module in model.named_modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in offsets:
                        offsets[id(tensor)] = end
                        end += round_up(tensor.numel() * tensor.element_size(), _TENSOR_ALIGNMENT_BYTES)
                    offset = offsets[id(tensor)]
                    self._places.append((tensors, name, tensor, offset))
                    digest.update(f"{module_name}.{name} {tuple(tensor.shape)} {tensor.dtype} {offset}\n".encode())
        self.size_bytes = max(end, 1)
        self.spec: dict[str, int | str] = {"tensors": len(self._places), "layout": digest.hexdigest()}

    def move(self, mapper: ArenaMapper, address: int, *, copy: bool) -> None:
        """Put every tensor at its place in the region, with its contents when `copy`."""
        import torch

        moved: dict[int, torch.Tensor] = {}
        new_parameters: dict[int, torch.Tensor] = {}
        for tensors, name, tensor, offset in self._places:
            if id(tensor) not in moved:
                place = mapper.tensor(address + offset, tuple(tensor.shape), tensor.dtype)
                if copy:
                    place.copy_(tensor.data)
                moved[id(tensor)] = place
            place = moved[id(tensor)]
            if not isinstance(tensor, torch.nn.Parameter):
                tensors[name] = place
            elif tensor.device.type == "meta":
                if id(tensor) not in new_parameters:
                    # A meta parameter cannot be given other data; its loader attributes must come along.
                    parameter = torch.Tensor._make_subclass(type(tensor), place, False)
                    parameter.__dict__.update(tensor.__dict__)
                    new_parameters[id(tensor)] = parameter
                tensors[name] = new_parameters[id(tensor)]
            else:
                tensor.data = place


def _build_without_memory(loader: Any, model_config: Any) -> Any:
    """The model's structure on torch's meta device, and SGLang's cache of rotary embeddings as it was before."""
    import torch
    from sglang.srt.layers.rotary_embedding.factory import _ROPE_DICT
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    quantization = _get_quantization_config(model_config, loader.load_config)
    if quantization is not None:
        raise UnsupportedEngineError("the model", f"quantized ({type(quantization).__name__})", "unquantized models")
    ropes = dict(_ROPE_DICT)
    with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
        model = _initialize_model(model_config, loader.load_config, None)
    _ROPE_DICT.clear()
    _ROPE_DICT.update(ropes)
    for module_name, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                _log.warning("belayer: %s.%s is a tensor outside parameters and buffers: not mapped", module_name, name)
    return model


def _device_name(device: Any, gpu_id: int | None) -> str:
    name = str(device)
    if name == "cuda":
        import torch

        return f"cuda:{torch.cuda.current_device() if gpu_id is None or gpu_id < 0 else gpu_id}"
    return name


def _tensor_parallel_rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)
