"""Kill a serving SGLang engine and measure how soon its streams go on, on the shadow that takes over.

    python -m benchmarks.handover --device cuda:0 --out DIR [--stage engine,kills,plain] [--budget-s 560]

Stages, each recorded as soon as it ends, whatever happens to the others:

    arena    the arena's contract tests, on this device, beside the other stages
    engine   SGLang with memory server, arena and ledger: start, throughput, an undisturbed reference run
    kills    SIGKILL of the scheduler at varying instants; the shadow takes over, in one of these modes (`--kills`):
             early   it adopts the KV cache and does not wait for the dead process to be torn down
             late    it adopts the KV cache and writes there once the dead process is gone
             refill  it computes everything again, once the dead process is gone
             zombie  as early, and the dead engine goes on writing to its KV cache (benchmarks/zombie.py)
    steady   throughput of the main that is left, with nothing else on the machine
    rearm    throughput of that main while a shadow starts
    update   new weights for that main: from tensors of another process and from disk, or with --trainer-device by
             broadcast from another device
    pair     new weights for that main (or a fresh one) and for a plain SGLang beside it, in turns
    everything  throughput through the gateway, with the journal in Redis and the actors, of that main without them, and
             of a plain SGLang beside it, in turns
    plain    SGLang without Belayer: cold start, throughput, and new weights if `update` was run
    cache    SGLang with its own weight cache: start

The last line is one JSON object; DIR/handover.json has every kill with its phases, DIR/engines.log the engines' logs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.handover_bench import Bench
from benchmarks.handover_everything import everything
from benchmarks.handover_figures import headline
from benchmarks.handover_kills import kills
from benchmarks.handover_loads import Load, parse_kills
from benchmarks.handover_stages import arena, cache, engine, pair, plain, rearm, steady, update
from benchmarks.sglang_shapes import SHAPES

STAGES = {
    "engine": engine,
    "kills": kills,
    "steady": steady,
    "rearm": rearm,
    "update": update,
    "pair": pair,
    "everything": everything,
    "plain": plain,
    "cache": cache,
}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    options.out.mkdir(parents=True, exist_ok=True)
    stages = options.stage.split(",")
    with tempfile.TemporaryDirectory(prefix="belayer-handover-") as folder:
        bench = Bench(options, Path(folder))
        try:
            beside = asyncio.create_task(bench.stage("arena", arena)) if "arena" in stages else None
            for name, work in STAGES.items():
                if name not in stages:
                    continue
                done = [*STAGES][: [*STAGES].index(name) + 1]
                later = sum(options.plain_s for other in stages if other in ("plain", "cache") and other not in done)
                if not await bench.stage(name, work, keep_s=later) and name == "engine":
                    break
            if beside is not None:
                await beside
        finally:
            await bench.close()
        bench.results |= headline(bench.results["stages"])
        bench.save()
        return {name: value for name, value in bench.results.items() if name != "stages"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.handover", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stage", default="engine,kills,steady,plain", help="some of arena," + ",".join(STAGES))
    parser.add_argument("--device", default="cuda:0", help="cuda:N or cpu")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks, on the devices from the first one on")
    parser.add_argument(
        "--trainer-device", default="", help="update: broadcast from this device instead, over NCCL (gloo on the CPU)"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="4b")
    parser.add_argument(
        "--load", type=Load.parse, default=Load(64, 2048), help="of the throughput runs: STREAMSxCONTEXT"
    )
    parser.add_argument("--tokens", type=int, default=200, help="tokens that each stream generates")
    parser.add_argument(
        "--kills", type=parse_kills, default=parse_kills("late:64x2048*10,early:64x2048*10,refill:64x2048*1"),
        help="MODE:STREAMSxCONTEXT*COUNT, separated by commas",
    )  # fmt: skip
    parser.add_argument("--wave", type=int, default=11, help="shadows that are started together")
    parser.add_argument("--rounds", type=int, default=5, help="of the stage everything")
    parser.add_argument("--apart", action="store_true", help="everything: two engines do not fit on the device")
    parser.add_argument(
        "--deterministic", action="store_true", help="SGLang's batch-invariant kernels (CUDA): bf16 must be equal too"
    )
    parser.add_argument("--overlap", action="store_true", help="start shadows during the throughput runs: saves time")
    parser.add_argument("--budget-s", type=float, default=560.0, help="the whole run ends within it")
    parser.add_argument("--plain-s", type=float, default=110.0, help="of it, what is kept for plain and for cache")
    parser.add_argument("--hang-s", type=float, default=20.0, help="silence after which a scheduler counts as hung")
    parser.add_argument("--start-timeout-s", type=float, default=300.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=_event_loop) as runner:
        print(json.dumps(runner.run(run(options))))


def _event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where SGLang's packages are: the caller's own time is part of what is measured."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


if __name__ == "__main__":
    main()
