"""What a shadow's scheduler computes from a death to its first step: `python -m benchmarks.takeover`, SGLang's Python.

A real SGLang scheduler on the CPU, made in this process, adopts what a made-up dead engine's ledger and slot table say,
takes the resuming requests in and builds their decode batch, over and over. No forward pass runs. Of each part: CPU
time (median and least of the rounds), how many of torch's operations it calls, and in how many of them the host would
wait for a GPU. There each is a kernel that a busy driver may hold up, which this machine cannot measure. (Copies
between host and device do not show: here they are none.)
"""

# torch and SGLang are not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from belayer.gpu.http_engine import RESUME_KEY
from belayer.gpu.ledger import Ledger, ledger_bytes, request_digest
from belayer.gpu.plugin.adoption import adopt
from belayer.gpu.plugin.ranks import Ranks
from belayer.gpu.plugin.resume import Resumption
from belayer.gpu.plugin.slots import Slots
from benchmarks.handover_loads import Load
from benchmarks.sglang_shapes import write_model

OUTPUT_TOKENS = 40
TAIL_TOKENS = 32
RESERVE = 8192


def make_scheduler(load: Load, folder: Path) -> Any:
    """A scheduler as its process would have it, with a tiny model."""
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process, publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    width = load.context + 256
    model = write_model(folder, "tiny")
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": width}
    (model / "config.json").write_text(json.dumps(config))
    arguments = f"--model-path {model} --device cpu --attention-backend torch_native --dtype float32"
    arguments += " --load-format dummy --sampling-backend pytorch --grammar-backend none --skip-tokenizer-init"
    arguments += " --random-seed 1 --log-level error"
    arguments += f" --max-running-requests {load.streams} --max-total-tokens {load.streams * width + 20480}"
    server_args = prepare_server_args(arguments.split())
    configure_scheduler_process(server_args, 0, 0, 0, 0, 0, 0, None)
    publish(server_args, role="scheduler")
    return Scheduler(server_args, PortArgs.init_new(server_args), 0, 0, 0, 0, 0, 0, None)


class DeadEngine:
    """Its ledger and slot table: `load.streams` rows of as many tokens, in slots that are scattered as in earnest."""

    def __init__(self, load: Load, pool: Any, size: int) -> None:
        import torch

        rows, width = pool.req_to_token.shape
        fd = os.memfd_create("ledger")
        os.ftruncate(fd, ledger_bytes(rows, width))
        self.ledger = Ledger(fd, rows, width)
        self.ledger.begin(1)
        self.prompts = load.prompts(500)
        chosen = torch.randperm(size - 1, generator=torch.Generator().manual_seed(1)) + 1
        self.table = torch.zeros_like(pool.req_to_token)
        at = 0
        for row, prompt in enumerate(self.prompts):
            tokens = prompt + [3 + n % 400 for n in range(OUTPUT_TOKENS)]
            self.ledger.write(row, request_digest(f"old-{row}"), 0, tokens, 0)
            self.table[row, : len(tokens)] = chosen[at : at + len(tokens)].to(torch.int32)
            at += len(tokens)
        self.ledger.reserve(chosen[at : at + RESERVE].tolist())


class Parts:
    """What each part of a takeover took, round after round."""

    def __init__(self) -> None:
        self.cpu_ms: dict[str, list[float]] = {}
        self.ops: dict[str, dict[str, int]] = {}
        self.counting = False

    def take(self, part: str, work: Callable[[], Any]) -> Any:
        if self.counting:
            with counted() as ops:
                result = work()
            self.ops[part] = ops.found()
            return result
        began_s = time.process_time()
        result = work()
        self.cpu_ms.setdefault(part, []).append((time.process_time() - began_s) * 1e3)
        return result


_VIEWS = {"_unsafe_view", "alias", "detach", "empty", "expand", "lift_fresh", "select", "slice", "unbind", "unsqueeze"}
_WAITS = {"_local_scalar_dense", "index by mask", "is_nonzero", "nonzero"}


def counted() -> Any:
    """A context in which torch's operations are counted; `found` has how many there were."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counted(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func.overloadpacket).removeprefix("aten.")
            if name == "index" and any(str(one.dtype) == "torch.bool" for one in args[1] if one is not None):
                name = "index by mask"
            self.names.append(name)
            return func(*args, **(kwargs or {}))

        def found(self) -> dict[str, int]:
            operations = sum(name not in _VIEWS for name in self.names)
            return {"operations": operations, "waits": sum(name in _WAITS for name in self.names)}

    return Counted()


def requests_of(dead: DeadEngine, tag: str) -> list[Any]:
    """The message in which all callers come back."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
    from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
    from sglang.srt.sampling.sampling_params import SamplingParams

    batch = []
    for row, entry in enumerate(dead.ledger.proven(1)):
        sampling = SamplingParams(max_new_tokens=100, temperature=0.0)
        sampling.custom_params = {RESUME_KEY: [f"old-{row}", len(entry.token_ids)]}
        sampling.normalize(None)
        request = dict(rid=f"{tag}-{row}", input_text="", input_ids=entry.token_ids[-TAIL_TOKENS:], stream=True)
        request |= dict(sampling_params=sampling, return_logprob=True, logprob_start_len=-1, top_logprobs_num=0)
        request |= dict.fromkeys(("mm_inputs", "input_embeds", "token_type_ids", "token_ids_logprob"))
        times = APIServerReqTimeStats(disagg_mode=DisaggregationMode.NULL)
        batch.append(TokenizedGenerateReqInput(**request, time_stats=times))
    return [BatchTokenizedGenerateReqInput(batch=batch)]


def take_over(scheduler: Any, slots: Slots, dead: DeadEngine, tag: str, parts: Parts) -> None:
    """One takeover, until the first step could be launched."""
    tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    requests = requests_of(dead, tag)
    entries = parts.take("read the ledger", lambda: list(dead.ledger.proven(1)))

    def adopting() -> Any:
        reserve = dead.ledger.reserved(1)
        adopted, free = adopt(tree, allocator, dead.table, entries, reserve, Ranks())
        slots.lay_out(free, reserve)
        return adopted

    adopted = parts.take("adopt", adopting)
    assert adopted.requests == len(entries), adopted
    resumption = Resumption()
    resumption.learn(entries)
    completed = parts.take("complete requests", lambda: resumption.completed(scheduler, requests))
    parts.take("make requests", lambda: scheduler.process_input_requests(completed))
    batch = parts.take("build the batch", lambda: resumption.join(scheduler, scheduler.running_batch))
    assert len(batch.reqs) == len(entries) and not scheduler.waiting_queue
    parts.take("prepare the step", batch.prepare_for_decode)


def clear(scheduler: Any, slots: Slots) -> None:
    """As before the takeover."""
    scheduler.tree_cache.reset()
    scheduler.token_to_kv_pool_allocator.clear()
    scheduler.req_to_token_pool.clear()
    scheduler.waiting_queue = []
    slots.forget()


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.takeover", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--load", type=Load.parse, default=Load(64, 2048))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="belayer-takeover-") as folder:
        scheduler = make_scheduler(options.load, Path(folder))
    slots = Slots(scheduler.tree_cache, scheduler.token_to_kv_pool_allocator)
    dead = DeadEngine(options.load, scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator.size)
    parts = Parts()
    for number in range(options.rounds + 1):
        parts.counting = number == 0
        take_over(scheduler, slots, dead, f"round{number}", parts)
        clear(scheduler, slots)
    result = {
        part: {"cpu_ms": round(statistics.median(took), 2), "least_ms": round(min(took), 2)} | parts.ops[part]
        for part, took in parts.cpu_ms.items()
    }
    machine = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
    }
    text = json.dumps(
        {"load": str(options.load), "machine": machine, "rounds": options.rounds, "parts": result}, indent=1
    )
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
