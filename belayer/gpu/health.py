"""Is the device fit to be lent? NVML's answer, without CUDA and without touching what runs on it.

NVML is asked in a thread of its own, over and over: for XID errors, which come as events, and for uncorrected ECC
errors. Whoever wants to know gets what is known, at once; when NVML itself fails, or is silent for too long (a driver
that hangs does not come back), that is the evidence. A device without NVML (the CPU) is always fit. NVML numbers GPUs
in its own order and knows no CUDA_VISIBLE_DEVICES, so the GPU is named by the PCI address that CUDA gives.

`python -m belayer.gpu.health` says which GPUs of this machine offer XID events, for `belayer doctor`.
"""

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from belayer.gpu.arena import device_index
from belayer.gpu.arena_cuda import pci_bus_id
from belayer.gpu.errors import ArenaError, DeviceCallError

BENIGN_XIDS = frozenset({13, 31, 43, 45, 137})
"""XIDs that say a program failed, not the device (NVIDIA, "XID errors": 13 and 31 illegal access of a program, 43
stopped processing, 45 cleanup after a process was killed, 137 a fault on another GPU's memory over NVLink, which a rank
meets when its peer is killed). A kill of ours causes some of these."""

_log = logging.getLogger("belayer.memory")
_EVENT_WAIT_MS = 1000
_SILENCE_S = 10.0

Look = Callable[[], str]
"""Asks once, in about a second, and returns why the device is unfit, or ""."""


def device_health(device: str) -> Callable[[], str]:
    """A function that returns at once: why the device is unfit, or "" when it is fit."""
    if device == "cpu":
        return lambda: ""
    return BoundedHealth(lambda: _open_nvml(pci_bus_id(device_index(device))))


class BoundedHealth:
    """`open_look` and the look that it gives run in a thread; a call never waits for them. Evidence stays."""

    def __init__(self, open_look: Callable[[], Look], *, silence_s: float = _SILENCE_S) -> None:
        self._open_look = open_look
        self._silence_s = silence_s
        self._evidence = ""
        self._asked_s = time.monotonic()
        threading.Thread(target=self._ask, name="device-health", daemon=True).start()

    def __call__(self) -> str:
        silent_s = time.monotonic() - self._asked_s
        if not self._evidence and silent_s > self._silence_s:
            return f"NVML has not answered for {silent_s:.1f} s"
        return self._evidence

    def _ask(self) -> None:
        try:
            look = self._open_look()
            while not self._evidence:
                self._asked_s = time.monotonic()
                self._evidence = look()
        except (ArenaError, ImportError, OSError) as error:
            self._evidence = f"NVML does not work: {error}"
        # What was found is found: nothing is asked any more, and so nothing is silent.
        self._asked_s = float("inf")


def _open_nvml(bus_id: str) -> Look:
    import pynvml

    def guarded(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except pynvml.NVMLError as error:
            raise DeviceCallError("NVML", str(error)) from None

    nvml = guarded(lambda: _Nvml(bus_id))
    if nvml.without_events:
        _log.warning("the GPU at %s is watched for ECC errors alone: %s", bus_id, nvml.without_events)
    return lambda: guarded(nvml.look)


class _Nvml:
    """NVML of one device, by its PCI address; raises NVMLError when it fails."""

    def __init__(self, bus_id: str) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)
        self._ecc_at_start = self._uncorrected_ecc()
        self._events: Any = None
        self.without_events = ""
        """Why no XID events come; a virtual machine may offer none. ECC and the engines' own errors remain."""
        try:
            events = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(self._handle, pynvml.nvmlEventTypeXidCriticalError, events)
            self._events = events
        except pynvml.NVMLError as error:
            self.without_events = f"NVML offers no XID events ({error})"

    def look(self) -> str:
        xid = self._next_xid()
        if xid is not None and xid not in BENIGN_XIDS:
            return f"XID {xid}"
        grown = self._uncorrected_ecc() - self._ecc_at_start
        return f"{grown} new uncorrected ECC errors" if grown > 0 else ""

    def _next_xid(self) -> int | None:
        """Waits for one for at most a second."""
        if self._events is None:
            time.sleep(_EVENT_WAIT_MS / 1000)
            return None
        try:
            return int(self._nvml.nvmlEventSetWait_v2(self._events, _EVENT_WAIT_MS).eventData)
        except self._nvml.NVMLError_Timeout:
            return None

    def _uncorrected_ecc(self) -> int:
        nvml = self._nvml
        kind, counter = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        try:
            return int(nvml.nvmlDeviceGetTotalEccErrors(self._handle, kind, counter))
        except nvml.NVMLError_NotSupported:
            return 0


def without_xid_events() -> list[str]:
    """For each GPU of this machine whose XID errors nobody is told of: which it is, and why."""
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    bus_ids = [str(pynvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
    return [f"{bus_id}: {why}" for bus_id in bus_ids if (why := _Nvml(bus_id).without_events)]


def main() -> int:
    """One line a GPU that offers no XID events; exit status 1 and the reason when NVML cannot be asked."""
    try:
        import pynvml
    except ImportError as error:
        sys.stderr.write(f"{error} (nvidia-ml-py has it)\n")
        return 1
    try:
        sys.stdout.writelines(f"{line}\n" for line in without_xid_events())
    except pynvml.NVMLError as error:
        sys.stderr.write(f"NVML does not work: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
