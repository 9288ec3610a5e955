"""The arena on the CPU: memfd allocations at fixed addresses, so that every test runs without a GPU.

A read-only export is a descriptor opened read-only, which the kernel refuses to map for writing; a write through the
mapping is a SIGSEGV, as it is an illegal access on a GPU.
"""

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from belayer.gpu.arena import Allocation, round_up
from belayer.gpu.errors import DeviceCallError

if TYPE_CHECKING:
    import torch

_GRANULARITY_BYTES = mmap.PAGESIZE
_SCRATCH_BYTES = 1 << 20
_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, mmap.PROT_READ, mmap.PROT_WRITE
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 0x01, 0x02, 0x10, 0x20
_MAP_NORESERVE, _MAP_FIXED_NOREPLACE = 0x4000, 0x100000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class CpuOwner:
    """See ArenaOwner."""

    granularity_bytes = _GRANULARITY_BYTES

    def create(self, size_bytes: int) -> Allocation:
        size_bytes = round_up(size_bytes, self.granularity_bytes)
        fd = os.memfd_create("belayer-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        return Allocation(fd, size_bytes)

    def export(self, allocation: Allocation, *, writable: bool) -> int:
        mode = os.O_RDWR if writable else os.O_RDONLY
        return os.open(f"/proc/self/fd/{allocation.handle}", mode | os.O_CLOEXEC)

    def release(self, allocation: Allocation) -> None:
        os.close(allocation.handle)


class CpuMapper:
    """See ArenaMapper."""

    granularity_bytes = _GRANULARITY_BYTES

    def take(self, fd: int, size_bytes: int) -> Allocation:
        return Allocation(fd, round_up(size_bytes, self.granularity_bytes))

    def reserve(self, address: int, size_bytes: int) -> None:
        size_bytes = round_up(size_bytes, self.granularity_bytes)
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
        _mmap(address, size_bytes, _PROT_NONE, flags, -1)

    def map(self, address: int, allocation: Allocation, *, writable: bool) -> None:
        protection = _PROT_READ | (_PROT_WRITE if writable else 0)
        _mmap(address, allocation.size_bytes, protection, _MAP_SHARED | _MAP_FIXED, allocation.handle)

    def protect(self, address: int, fd: int, size_bytes: int, *, writable: bool) -> None:
        allocation = self.take(fd, size_bytes)
        try:
            self.map(address, allocation, writable=writable)
        finally:
            self.forget(allocation)

    def map_scratch(self, address: int, size_bytes: int) -> None:
        size_bytes = round_up(size_bytes, self.granularity_bytes)
        fd = os.memfd_create("belayer-scratch", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _SCRATCH_BYTES)
            for offset in range(0, size_bytes, _SCRATCH_BYTES):
                length = min(_SCRATCH_BYTES, size_bytes - offset)
                _mmap(address + offset, length, _PROT_READ | _PROT_WRITE, _MAP_SHARED | _MAP_FIXED, fd)
        finally:
            os.close(fd)

    def unmap(self, address: int, size_bytes: int) -> None:
        size_bytes = round_up(size_bytes, self.granularity_bytes)
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _mmap(address, size_bytes, _PROT_NONE, flags, -1)

    def forget(self, allocation: Allocation) -> None:
        os.close(allocation.handle)

    def tensor(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        import math

        import torch

        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        memory = (ctypes.c_uint8 * size_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(tuple(shape))

    def synchronize(self) -> None:
        """Nothing runs on after a call here."""


def _mmap(address: int, size_bytes: int, protection: int, flags: int, fd: int) -> None:
    got = _libc.mmap(address, size_bytes, protection, flags, fd, 0)
    if got != address:
        cause = os.strerror(ctypes.get_errno()) if got in (None, ctypes.c_void_p(-1).value) else f"it gave {got:#x}"
        raise DeviceCallError(f"mmap of {size_bytes} bytes at {address:#x}", cause)
