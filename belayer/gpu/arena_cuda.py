"""The arena on an NVIDIA GPU: CUDA virtual memory management (driver API, section "Virtual Memory Management").

Allocations are exported as POSIX file descriptors and mapped at fixed addresses; a write through a read-only mapping
is an illegal access that ends the writer's context and touches nothing. An allocation must be mapped as a whole.
Measured on an H200: import, map and set access of 40 GiB take 1.3 ms together.
"""

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from belayer.gpu.arena import Allocation, round_up
from belayer.gpu.errors import DeviceCallError

if TYPE_CHECKING:
    import torch

_GRANULARITY_BYTES = 2 << 20
_SCRATCH_BYTES = 256 << 20
_BUS_ID_BYTES = 32


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _checked(call: str, result: tuple[Any, ...]) -> Any:
    """The value of a driver call, which comes as (error, value...)."""
    error, *values = result
    if error != _driver().CUresult.CUDA_SUCCESS:
        raise DeviceCallError(call, str(error))
    return values[0] if values else None


def _properties(device: int) -> Any:
    cuda = _driver()
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    properties.requestedHandleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return properties


def pci_bus_id(device: int) -> str:
    """Where CUDA's device of that number is on the PCI bus, as NVML names it too: `0000:C1:00.0`.

    CUDA's numbers depend on CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; NVML knows neither.
    """
    cuda = _driver()
    _checked("cuInit", cuda.cuInit(0))
    handle = _checked("cuDeviceGet", cuda.cuDeviceGet(device))
    name: bytes = _checked("cuDeviceGetPCIBusId", cuda.cuDeviceGetPCIBusId(_BUS_ID_BYTES, handle))
    return name.rstrip(b"\0").decode()


class CudaOwner:
    """See ArenaOwner. Runs no kernel; its context is made only if the driver asks for one."""

    granularity_bytes = _GRANULARITY_BYTES

    def __init__(self, device: int) -> None:
        self._device = device
        _checked("cuInit", _driver().cuInit(0))

    def create(self, size_bytes: int) -> Allocation:
        size_bytes = round_up(size_bytes, self.granularity_bytes)
        try:
            handle = self._create(size_bytes)
        except DeviceCallError as error:
            if "CONTEXT" not in error.cause:
                raise
            _use_primary_context(self._device)
            handle = self._create(size_bytes)
        return Allocation(int(handle), size_bytes)

    def _create(self, size_bytes: int) -> Any:
        return _checked("cuMemCreate", _driver().cuMemCreate(size_bytes, _properties(self._device), 0))

    def export(self, allocation: Allocation, *, writable: bool) -> int:
        """CUDA's descriptors carry no access mode: a reader is read-only by what it maps, which our mapper decides."""
        del writable
        cuda = _driver()
        kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = cuda.CUmemGenericAllocationHandle(allocation.handle)
        return int(_checked("cuMemExportToShareableHandle", cuda.cuMemExportToShareableHandle(handle, kind, 0)))

    def release(self, allocation: Allocation) -> None:
        cuda = _driver()
        _checked("cuMemRelease", cuda.cuMemRelease(cuda.CUmemGenericAllocationHandle(allocation.handle)))


class CudaMapper:
    """See ArenaMapper. Used in a process whose CUDA context torch has made."""

    granularity_bytes = _GRANULARITY_BYTES

    def __init__(self, device: int) -> None:
        self._device = device
        self._scratch: dict[int, list[Any]] = {}

    def take(self, fd: int, size_bytes: int) -> Allocation:
        cuda = _driver()
        kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._ready()
        try:
            handle = _checked("cuMemImportFromShareableHandle", cuda.cuMemImportFromShareableHandle(fd, kind))
        finally:
            os.close(fd)
        return Allocation(int(handle), round_up(size_bytes, self.granularity_bytes))

    def reserve(self, address: int, size_bytes: int) -> None:
        self._ready()
        cuda = _driver()
        size_bytes = round_up(size_bytes, self.granularity_bytes)
        got = int(_checked("cuMemAddressReserve", cuda.cuMemAddressReserve(size_bytes, 0, address, 0)))
        if got != address:
            _checked("cuMemAddressFree", cuda.cuMemAddressFree(got, size_bytes))
            raise DeviceCallError(f"cuMemAddressReserve of {size_bytes} bytes at {address:#x}", f"it gave {got:#x}")

    def map(self, address: int, allocation: Allocation, *, writable: bool) -> None:
        cuda = _driver()
        handle = cuda.CUmemGenericAllocationHandle(allocation.handle)
        _checked("cuMemMap", cuda.cuMemMap(address, allocation.size_bytes, 0, handle, 0))
        self._set_access(address, allocation.size_bytes, writable)

    def protect(self, address: int, fd: int, size_bytes: int, *, writable: bool) -> None:
        os.close(fd)  # the driver needs no other handle for another access
        self.synchronize()
        self._set_access(address, round_up(size_bytes, self.granularity_bytes), writable)

    def map_scratch(self, address: int, size_bytes: int) -> None:
        """Takes 256 MiB, or less than twice that when the size is no multiple of it."""
        self._ready()
        size_bytes = round_up(size_bytes, self.granularity_bytes)
        pieces: dict[int, Any] = {}
        for offset in range(0, size_bytes, _SCRATCH_BYTES):
            length = min(_SCRATCH_BYTES, size_bytes - offset)
            if length not in pieces:
                created = _driver().cuMemCreate(length, _properties(self._device), 0)
                pieces[length] = _checked("cuMemCreate", created)
            _checked("cuMemMap", _driver().cuMemMap(address + offset, length, 0, pieces[length], 0))
        self._scratch[address] = list(pieces.values())
        self._set_access(address, size_bytes, True)
        for offset in {0, (size_bytes - 1) // _SCRATCH_BYTES * _SCRATCH_BYTES}:
            length = min(_SCRATCH_BYTES, size_bytes - offset)
            self.tensor(address + offset, (length,), _torch().uint8).zero_()

    def unmap(self, address: int, size_bytes: int) -> None:
        cuda = _driver()
        self.synchronize()
        size_bytes = round_up(size_bytes, self.granularity_bytes)
        _checked("cuMemUnmap", cuda.cuMemUnmap(address, size_bytes))
        for piece in self._scratch.pop(address, []):
            _checked("cuMemRelease", cuda.cuMemRelease(piece))

    def forget(self, allocation: Allocation) -> None:
        cuda = _driver()
        _checked("cuMemRelease", cuda.cuMemRelease(cuda.CUmemGenericAllocationHandle(allocation.handle)))

    def tensor(self, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        torch = _torch()
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=f"cuda:{self._device}")
        memory = _Memory(address, size_bytes)
        return torch.as_tensor(memory, device=f"cuda:{self._device}").view(dtype).view(tuple(shape))

    def synchronize(self) -> None:
        _torch().cuda.synchronize(self._device)

    def _ready(self) -> None:
        """Make torch's context current in this thread."""
        _torch().zeros(1, device=f"cuda:{self._device}")

    def _set_access(self, address: int, size_bytes: int, writable: bool) -> None:
        cuda = _driver()
        flags = cuda.CUmemAccess_flags
        access = cuda.CUmemAccessDesc()
        access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._device
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        _checked("cuMemSetAccess", cuda.cuMemSetAccess(address, size_bytes, [access], 1))


class _Memory:
    """Device memory as numba's CUDA array interface, version 3, which torch.as_tensor reads without a copy."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 3,
            "strides": None,
        }


def _torch() -> Any:
    import torch

    return torch


def _use_primary_context(device: int) -> None:
    cuda = _driver()
    handle = _checked("cuDeviceGet", cuda.cuDeviceGet(device))
    _checked("cuCtxSetCurrent", cuda.cuCtxSetCurrent(_checked("cuCtxRetain", cuda.cuDevicePrimaryCtxRetain(handle))))
