"""What the parts of the plugin share in one engine process: the memory server's connection and the arena's mapper."""

from __future__ import annotations

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false
import os
from typing import Any

from belayer.gpu import wire
from belayer.gpu.arena import ArenaMapper, open_mapper
from belayer.gpu.memory_client import MemoryClient

_LOADING_TIMEOUT_S = 1800.0


class Link:
    """Connects when it is first used, which only the scheduler process does."""

    def __init__(self, socket_path: str, incarnation: str, role: wire.Role) -> None:
        self.incarnation = incarnation
        self.role: wire.Role = role
        self._socket_path = socket_path
        self._client: MemoryClient | None = None
        self._mapper: ArenaMapper | None = None
        self._arena: wire.Region | None = None

    @classmethod
    def from_environment(cls) -> Link:
        """BELAYER_MEMORY_SOCKET, BELAYER_INCARNATION and BELAYER_ROLE, as the engine's launcher sets them.

        `{rank}` in the socket's path stands for the tensor parallel rank: each rank has a memory server of its own.
        """
        role: wire.Role = "shadow" if os.environ.get("BELAYER_ROLE") == "shadow" else "main"
        incarnation = os.environ.get("BELAYER_INCARNATION", f"pid-{os.getpid()}")
        return cls(os.environ["BELAYER_MEMORY_SOCKET"], incarnation, role)

    @property
    def client(self) -> MemoryClient:
        if self._client is None:
            path = self._socket_path
            if "{rank}" in path:
                path = path.replace("{rank}", str(_tensor_parallel_rank()))
            self._client, registered = MemoryClient.connect(path, self.incarnation, self.role, _LOADING_TIMEOUT_S)
            self._arena = registered.arena
        return self._client

    @property
    def arena(self) -> wire.Region | None:
        """The arena that the server had when we connected; None when we are its first engine."""
        return self._arena if self.client else None

    def mapper(self, device: Any = None, gpu_id: int | None = None) -> ArenaMapper:
        """The mapper of the device on which this process's model is loaded; name the device the first time."""
        if self._mapper is None:
            self._mapper = open_mapper(_device_name(device, gpu_id))
        return self._mapper


def _device_name(device: Any, gpu_id: int | None) -> str:
    name = str(device)
    if name == "cuda":
        import torch

        return f"cuda:{torch.cuda.current_device() if gpu_id is None or gpu_id < 0 else gpu_id}"
    return name


def _tensor_parallel_rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)
