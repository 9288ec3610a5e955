"""Is the device fit to be lent? NVML's answer, without CUDA and without touching what runs on it.

NVML is asked in a thread of its own, over and over: for XID errors, which come as events, and for uncorrected ECC
errors. Whoever wants to know gets what is known, at once; when NVML itself fails, or is silent for too long (a driver
that hangs does not come back), that is the evidence. A device without NVML (the CPU) is always fit.
"""

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from belayer.gpu.arena import device_index
from belayer.gpu.errors import ArenaError, DeviceCallError

BENIGN_XIDS = frozenset({13, 31, 43, 45, 137})
"""XIDs that say a program failed, not the device (NVIDIA, "XID errors": 13 and 31 illegal access of a program, 43
stopped processing, 45 cleanup after a process was killed, 137 a fault on another GPU's memory over NVLink, which a rank
meets when its peer is killed). A kill of ours causes some of these."""

_EVENT_WAIT_MS = 1000
_SILENCE_S = 10.0

Look = Callable[[], str]
"""Asks once, in about a second, and returns why the device is unfit, or ""."""


def device_health(device: str) -> Callable[[], str]:
    """A function that returns at once: why the device is unfit, or "" when it is fit."""
    if device == "cpu":
        return lambda: ""
    return BoundedHealth(lambda: _open_nvml(device_index(device)))


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


def _open_nvml(index: int) -> Look:
    import pynvml

    def guarded(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except pynvml.NVMLError as error:
            raise DeviceCallError("NVML", str(error)) from None

    nvml = guarded(lambda: _Nvml(index))
    return lambda: guarded(nvml.look)


class _Nvml:
    """NVML of one device; raises NVMLError when it fails."""

    def __init__(self, index: int) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self._ecc_at_start = self._uncorrected_ecc()
        self._events: Any = None
        try:
            events = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(self._handle, pynvml.nvmlEventTypeXidCriticalError, events)
            self._events = events
        except pynvml.NVMLError:
            pass  # a virtual machine may offer no events; ECC and the engines' own errors remain

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
