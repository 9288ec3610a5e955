"""An engine that goes on writing to the KV cache after its scheduler is gone: a plugin for SGLang, for tests alone.

Active with BELAYER_ZOMBIE_FOLDER in the environment. When the file FOLDER/INCARNATION appears, that engine's scheduler
starts another thread and ends its own thread between two steps, as a kill would, without a chance to clean up. So its
bell rings, while its process stays and writes, over and over, NaN wherever a step of its own could still have written:
to every free slot but the reserve, to the slots of the steps in flight, and to slot 0. It counts its rounds in
FOLDER/INCARNATION.rounds and ends when FOLDER/INCARNATION is removed.
"""

# SGLang and torch are not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path
from typing import Any

_SYS_EXIT = 60  # x86-64: ends the calling thread alone
_LIMIT_S = 60.0


def register() -> None:
    """SGLang calls this in each of its processes."""
    folder = os.environ.get("BELAYER_ZOMBIE_FOLDER")
    if not folder:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    trigger = Path(folder) / os.environ.get("BELAYER_INCARNATION", "")

    def step_launched(result: Any, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
        if batch.forward_mode.is_decode() and trigger.exists():
            _become(scheduler, batch, trigger)

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", step_launched, HookType.AFTER)


def _become(scheduler: Any, batch: Any, trigger: Path) -> None:
    slots = _could_be_written(scheduler, batch)
    wrote = threading.Event()
    threading.Thread(target=_write, args=(scheduler, slots, trigger, wrote), name="zombie", daemon=True).start()
    wrote.wait(_LIMIT_S)
    ctypes.CDLL(None).syscall(_SYS_EXIT, 0)  # a foreign call: the thread ends without Python's lock


def _could_be_written(scheduler: Any, batch: Any) -> Any:
    import torch

    allocator, table = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool.req_to_token
    slots = [allocator.free_pages, allocator.release_pages]
    for number, request in enumerate(batch.reqs):
        proven = len(request.origin_input_ids) + len(request.output_ids) - 1
        slots.append(table[request.req_pool_idx, proven : int(batch.seq_lens_cpu[number])].to(torch.int64))
    slots.append(torch.zeros(1, dtype=torch.int64, device=table.device))
    return torch.cat(slots)


def _write(scheduler: Any, slots: Any, trigger: Path, wrote: threading.Event) -> None:
    import torch

    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    rounds = trigger.with_suffix(".rounds")
    end_s = time.monotonic() + _LIMIT_S
    count = 0
    stream = torch.cuda.Stream() if slots.is_cuda else None
    with torch.no_grad(), torch.cuda.stream(stream):
        while trigger.exists() and time.monotonic() < end_s:
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer[slots] = float("nan")
            if stream is not None:
                stream.synchronize()
            count += 1
            written = rounds.with_suffix(".new")
            written.write_text(str(count))
            written.replace(rounds)
            wrote.set()
    os._exit(0)
