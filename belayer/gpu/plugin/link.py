"""What the parts of the plugin share in one engine process: the memory server's connection and the arena's mapper."""

from __future__ import annotations

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false
import os
from typing import Any

from belayer.gpu import wire
from belayer.gpu.arena import ArenaMapper, open_mapper
from belayer.gpu.memory_client import MemoryClient
from belayer.gpu.plugin.ranks import Ranks

_LOADING_TIMEOUT_S = 1800.0


class Link:
    """Connects when it is first used, which only the scheduler process does."""

    def __init__(self, socket_path: str, incarnation: str, role: wire.Role) -> None:
        self.incarnation = incarnation
        self.role: wire.Role = role
        self._socket_path = socket_path
        self._client: MemoryClient | None = None
        self._mapper: ArenaMapper | None = None
        self.ranks = Ranks()
        self.weights_are_whole = False
        """Whether all ranks' servers had the same version of the weights when we connected."""
        self._tokens: int | None = None

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
            self.ranks = Ranks.of_this_process()
            path = self._socket_path.replace("{rank}", str(self.ranks.rank))
            self._client, registered = MemoryClient.connect(path, self.incarnation, self.role, _LOADING_TIMEOUT_S)
            arena, weights = registered.arena, registered.weights
            said = self.ranks.all_say((weights.state, weights.version, int(arena.spec["tokens"]) if arena else None))
            self.weights_are_whole = len({(state, version) for state, version, _ in said}) == 1
            self._tokens = next((tokens for _, _, tokens in said if tokens is not None), None)
        return self._client

    @property
    def tokens(self) -> int | None:
        """The KV cache's size on the server when we connected; None when we are its first engine."""
        return self._tokens if self.client else None

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
