"""What an engine takes of the machine: its processes' memory, and the device's. Linux's /proc, nvidia-smi and NVML."""

# NVML's package is the engine's, not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

_ASK_S = 10.0


def processes_of(pid: int) -> list[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found, pending = [pid], [pid]
    while pending:
        born = children.get(pending.pop(), [])
        found += born
        pending += born
    return found


def host_bytes(pid: int) -> int:
    """Memory of the process and its descendants, what they share counted once (PSS); 0 when they are gone."""
    total = 0
    for process in processes_of(pid):
        try:
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
        except (OSError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))
    return total


def device_bytes(pid: int) -> int | None:
    """GPU memory of the process and its descendants, context included; None where nvidia-smi does not tell."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_S)
    except (subprocess.TimeoutExpired, OSError):
        return None
    processes = set(processes_of(pid))
    rows = [line.split(",") for line in done.stdout.splitlines() if line.count(",") == 1]
    used = [int(mebibytes) << 20 for process, mebibytes in rows if _number(process) in processes and _number(mebibytes)]
    return sum(used) if used else None


def holding(pids: Iterable[int]) -> set[int]:
    """Those of the processes that NVML lists on a GPU: they have memory there. Empty where NVML does not tell."""
    try:
        import pynvml
    except ImportError:
        return set()
    listed: set[int] = set()
    # Of a package that is newer than the driver; no NVMLError, and not in old packages.
    mismatch = getattr(pynvml, "NVMLLibraryMismatchError", pynvml.NVMLError)
    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            listed |= {int(one.pid) for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except (pynvml.NVMLError, mismatch):
        return set()
    return listed & set(pids)


def _number(text: str) -> int:
    return int(text) if text.strip().isdecimal() else 0


def _parents() -> Iterator[tuple[int, int]]:
    """(pid, parent's pid) of every process, proc(5)."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                stat = (folder / "stat").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            yield int(folder.name), int(stat[stat.rindex(b")") + 2 :].split()[1])
