"""A plugin for SGLang that makes its scheduler fail in the middle of a step, in earnest, when a test asks for it.

It is active where BELAYER_TEST_FAULTS names a folder; what to do is the name of a file in it, removed when it is done.
"""

# SGLang and torch are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

PREFILL_S = 60.0 if os.environ.get("BELAYER_LONG") == "1" else 4.0
"""How long the slow prefill computes."""


STRUCK = "struck_ns"
"""The file beside the faults' folder that says when the last one struck: time.time_ns()."""


def write_plugin(folder: Path, root: Path) -> str:
    """A PYTHONPATH with which SGLang finds this plugin."""
    info = folder / "belayer_faults-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: belayer-faults\nVersion: 0\n")
    entry = "[sglang.srt.plugins]\nbelayer_faults = tests.gpu.sglang_faults:register\n"
    (info / "entry_points.txt").write_text(entry)
    return os.pathsep.join((str(folder), str(root)))


def register() -> None:
    """SGLang calls this in each of its processes."""
    if "BELAYER_TEST_FAULTS" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", _fail, HookType.AROUND)


def _fail(original: Any, scheduler: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
    folder = Path(os.environ["BELAYER_TEST_FAULTS"])
    extends = batch.forward_mode.is_extend()
    for path in folder.iterdir():
        if (path.name == "slow") == extends:
            (folder.parent / STRUCK).write_text(str(time.time_ns()))
            path.unlink()
            _FAULTS[path.name]()
    return original(scheduler, batch, *arguments, **named)


def _segv() -> None:
    ctypes.string_at(0)


def _raise() -> None:
    raise ValueError("injected into a step")


def _deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _out_of_memory() -> None:
    import torch

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + (16 << 20), resource.RLIM_INFINITY))
    torch.empty(1 << 30, dtype=torch.uint8)


def _compute() -> None:
    """A forward pass that takes so long: one processor is busy, and Python does not get a turn for most of it."""
    import torch

    end_s = time.monotonic() + PREFILL_S
    matrix = torch.ones(1024, 1024)
    while time.monotonic() < end_s:
        matrix @ matrix


_FAULTS = {"segv": _segv, "raise": _raise, "deadlock": _deadlock, "oom": _out_of_memory, "slow": _compute}
