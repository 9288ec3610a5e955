"""Memory of one device that outlives the engines that use it, as two small roles.

The memory server owns allocations (`ArenaOwner`) and hands them out as file descriptors. An engine reserves fixed
addresses and maps what it was lent there (`ArenaMapper`). The addresses are the same in every engine of a device, so
that a CUDA graph captured by one process is valid over the memory of another.

Invariant: memory that was exported read-only cannot be written through that mapping. An allocation is mapped as a
whole. When a call fails, DeviceCallError names it and nothing is mapped half.
"""

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from belayer.errors import InputError

if TYPE_CHECKING:
    import torch

WEIGHTS_ADDRESS = 0x7000_0000_0000
KV_ADDRESS = 0x7200_0000_0000
"""Where every engine maps the two regions: 2 TiB apart, in a part of user space that loaders and drivers leave free."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory of the device. `handle` is the backend's: a file descriptor, or a CUDA allocation handle."""

    handle: int
    size_bytes: int


class ArenaOwner(Protocol):
    """The memory server's side."""

    granularity_bytes: int

    def create(self, size_bytes: int) -> Allocation:
        """Allocate at least that many bytes, rounded up to the granularity."""
        ...

    def export(self, allocation: Allocation, *, writable: bool) -> int:
        """A new file descriptor, the caller's to close, through which another process can map the allocation."""
        ...

    def release(self, allocation: Allocation) -> None:
        """Give it back; processes that have it mapped keep it until they unmap."""
        ...


class ArenaMapper(Protocol):
    """An engine's side."""

    granularity_bytes: int

    def take(self, fd: int, size_bytes: int) -> Allocation:
        """The allocation behind a file descriptor that the server sent. Takes the descriptor over."""
        ...

    def reserve(self, address: int, size_bytes: int) -> None:
        """Set the addresses aside, without memory. DeviceCallError when something else is there."""
        ...

    def map(self, address: int, allocation: Allocation, *, writable: bool) -> None:
        """Map a whole allocation at reserved addresses."""
        ...

    def protect(self, address: int, fd: int, size_bytes: int, *, writable: bool) -> None:
        """Change what this process may do with a mapped allocation. `fd`: it again, exported so; taken over."""
        ...

    def map_scratch(self, address: int, size_bytes: int) -> None:
        """Back the addresses with little memory, so that reads and writes work without the real allocation.

        It is one small piece mapped again and again: what is read is whatever was written last anywhere in it.
        """
        ...

    def unmap(self, address: int, size_bytes: int) -> None:
        """Take the memory away again and keep the addresses. Scratch that was mapped there is freed."""
        ...

    def forget(self, allocation: Allocation) -> None:
        """Drop our reference; what is mapped stays mapped."""
        ...

    def tensor(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over mapped memory; valid only while something is mapped there."""
        ...

    def synchronize(self) -> None:
        """Return once everything that was launched on the device has ended."""
        ...


class Lendable:
    """An allocation whose descriptors were exported when it was made.

    The driver is slow to export while it tears a dead process down, which is when memory is lent.
    """

    def __init__(self, owner: ArenaOwner, size_bytes: int) -> None:
        self._owner = owner
        self._allocation = owner.create(size_bytes)
        self._fds = [owner.export(self._allocation, writable=writable) for writable in (False, True)]
        self.size_bytes = self._allocation.size_bytes

    def lend(self, *, writable: bool) -> int:
        """A descriptor, the caller's to close."""
        return os.dup(self._fds[writable])

    def release(self) -> None:
        """See ArenaOwner.release."""
        for fd in self._fds:
            os.close(fd)
        self._owner.release(self._allocation)


def round_up(size_bytes: int, granularity_bytes: int) -> int:
    return -(-size_bytes // granularity_bytes) * granularity_bytes


def open_owner(device: str) -> ArenaOwner:
    """The owner for `cpu` or `cuda:N`."""
    if device == "cpu":
        from belayer.gpu.arena_cpu import CpuOwner

        return CpuOwner()
    from belayer.gpu.arena_cuda import CudaOwner

    return CudaOwner(device_index(device))


def open_mapper(device: str) -> ArenaMapper:
    """The mapper for `cpu` or `cuda:N`."""
    if device == "cpu":
        from belayer.gpu.arena_cpu import CpuMapper

        return CpuMapper()
    from belayer.gpu.arena_cuda import CudaMapper

    return CudaMapper(device_index(device))


def device_index(device: str) -> int:
    """N of `cuda:N`; 0 of `cuda`."""
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise InputError(f"{device!r} is not a device; expected cpu, cuda or cuda:N")
    return int(index or "0")
