"""Is the device fit to be lent? NVML's answer, without CUDA and without touching what runs on it.

XID errors come as NVML events, collected in the background; uncorrected ECC errors are read when asked. A device
without NVML (the CPU) is always fit. When NVML itself fails, that is the evidence.
"""

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from belayer.gpu.arena import device_index

BENIGN_XIDS = frozenset({13, 31, 43, 45})
"""XIDs that say a program failed, not the device (NVIDIA, "XID errors": 13 and 31 illegal access of a program, 43
stopped processing, 45 cleanup after a process was killed). A kill of ours causes some of these."""

_WAIT_MS = 1000


def device_health(device: str) -> Callable[[], str]:
    """A function that returns why the device is unfit, or "" when it is fit."""
    if device == "cpu":
        return lambda: ""
    return _NvmlHealth(device_index(device))


class _NvmlHealth:
    def __init__(self, index: int) -> None:
        import pynvml

        self._nvml: Any = pynvml
        self._evidence = ""
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            self._ecc_at_start = self._uncorrected_ecc()
            self._watch_xids()
        except pynvml.NVMLError as error:
            self._evidence = f"NVML does not work: {error}"

    def __call__(self) -> str:
        if self._evidence:
            return self._evidence
        try:
            grown = self._uncorrected_ecc() - self._ecc_at_start
        except self._nvml.NVMLError as error:
            return f"NVML does not answer: {error}"
        return f"{grown} new uncorrected ECC errors" if grown > 0 else ""

    def _uncorrected_ecc(self) -> int:
        nvml = self._nvml
        kind, counter = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        try:
            return int(nvml.nvmlDeviceGetTotalEccErrors(self._handle, kind, counter))
        except nvml.NVMLError_NotSupported:
            return 0

    def _watch_xids(self) -> None:
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError:
            return  # a virtual machine may offer no events; ECC and the engines' own errors remain

        def watch() -> None:
            while True:
                try:
                    event = nvml.nvmlEventSetWait_v2(events, _WAIT_MS)
                except nvml.NVMLError_Timeout:
                    continue
                except nvml.NVMLError:
                    return
                if event.eventData not in BENIGN_XIDS:
                    self._evidence = f"XID {event.eventData}"

        threading.Thread(target=watch, name="xid-watch", daemon=True).start()
