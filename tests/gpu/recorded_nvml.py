"""Recorded answers of NVML and of CUDA's driver, in the place of the modules `pynvml` and `cuda.bindings.driver`.

Not a GPU and no claim to be one: no machine of CI has NVML, so what our own code asks for, and what it makes of the
answers, is tested with these. Their names and shapes are those of nvidia-ml-py 13 and cuda-bindings 13.
"""

from __future__ import annotations

import queue
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class NVMLError(Exception):
    """The root of NVML's errors."""


class NVMLErrorTimeout(NVMLError):
    """Nothing happened in time."""


class NVMLErrorNotSupported(NVMLError):
    """This GPU, or this virtual machine, has it not."""


class NVMLLibraryMismatchError(Exception):
    """The package is newer than the driver. Not one of NVML's errors, as in nvidia-ml-py."""


@dataclass
class RecordedGpu:
    """What NVML says of one GPU."""

    bus_id: str
    ecc_errors: int = 0
    xids: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue[int])
    offers_events: bool = True
    running: list[int] = field(default_factory=list[int])
    """Processes with a context on it."""
    asked: int = 0
    """How often these were asked for."""
    driver_is_old: bool = False


class RecordedNvml(ModuleType):
    """GPUs in NVML's order."""

    NVMLError = NVMLError
    NVMLLibraryMismatchError = NVMLLibraryMismatchError
    NVMLError_Timeout = NVMLErrorTimeout
    NVMLError_NotSupported = NVMLErrorNotSupported
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, gpus: list[RecordedGpu]) -> None:
        super().__init__("pynvml")
        self.gpus = gpus

    def nvmlInit(self) -> None:
        """Always works."""

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> RecordedGpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> RecordedGpu:
        return next(gpu for gpu in self.gpus if gpu.bus_id == bus_id)

    def nvmlDeviceGetPciInfo(self, gpu: RecordedGpu) -> Any:
        return SimpleNamespace(busId=gpu.bus_id)

    def nvmlDeviceGetTotalEccErrors(self, gpu: RecordedGpu, kind: int, counter: int) -> int:
        assert (kind, counter) == (1, 0)
        return gpu.ecc_errors

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: RecordedGpu) -> list[Any]:
        gpu.asked += 1
        if gpu.driver_is_old:
            raise NVMLLibraryMismatchError("Unversioned function called")
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in gpu.running]

    def nvmlEventSetCreate(self) -> list[RecordedGpu]:
        return []

    def nvmlDeviceRegisterEvents(self, gpu: RecordedGpu, kinds: int, events: list[RecordedGpu]) -> None:
        assert kinds == 8
        if not gpu.offers_events:
            raise NVMLErrorNotSupported("Not Supported")
        events.append(gpu)

    def nvmlEventSetWait_v2(self, events: list[RecordedGpu], timeout_ms: int) -> Any:
        try:
            return SimpleNamespace(eventData=events[0].xids.get(timeout=timeout_ms / 1000))
        except queue.Empty:
            raise NVMLErrorTimeout("Timeout") from None


class _RecordedDriver(ModuleType):
    """CUDA's devices by their PCI addresses, in CUDA's order."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self, bus_ids: list[str]) -> None:
        super().__init__("cuda.bindings.driver")
        self._bus_ids = bus_ids

    def cuInit(self, flags: int) -> tuple[int]:
        return (flags,)

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:
        return (0, ordinal)

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> tuple[int, bytes]:
        return (0, self._bus_ids[device].encode().ljust(length, b"\0"))


def replay(monkeypatch: pytest.MonkeyPatch, gpus: list[RecordedGpu], visible: list[RecordedGpu]) -> None:
    """From now on `pynvml` has these GPUs, and CUDA those of them that are `visible`, in that order."""
    driver = _RecordedDriver([gpu.bus_id for gpu in visible])
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", RecordedNvml(gpus))
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
