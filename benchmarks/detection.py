"""How soon each kind of failure is in the journal: `python -m benchmarks.detection --folder DIR [--out FILE] [FAULT]`.

A worker with a real SGLang (on the CPU, or with --device on a GPU) under a detector, one engine at a time and no
shadow. While it streams, one fault strikes; what counts is the time from the fault (from inside the scheduler, or just
before the signal) to the time of FailureDetected in the journal. The figures are added to those in FILE. Needs
scripts/sglang_cpu.sh once, or BELAYER_SGLANG_PYTHON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import time
from pathlib import Path
from typing import Any

from belayer import ids
from belayer.actors.actor import run_actor
from belayer.actors.detector import Detector
from belayer.errors import EngineFailedError
from belayer.gpu import sglang_cpu
from belayer.gpu.memory_process import MemoryProcess
from belayer.gpu.protocol import EngineProcess, Sampling
from belayer.gpu.sglang_host import SglangHost
from belayer.journal.events import FailureDetected, WorkerReady, WorkerRegistered
from belayer.journal.memory_store import MemoryStore
from belayer.journal.writer import Reader, take_over
from belayer.processes import host_name
from tests.gpu.sglang_faults import STRUCK, write_plugin

ROOT = Path(__file__).resolve().parents[1]
FAULTS: dict[str, str | signal.Signals] = {
    "SIGKILL of the scheduler": signal.SIGKILL,
    "SIGABRT of the scheduler": signal.SIGABRT,
    "SIGSTOP of the scheduler": signal.SIGSTOP,
    "SIGKILL of the engine process": "engine",
    "segmentation fault in a step": "segv",
    "exception in a step": "raise",
    "out of memory in a step": "oom",
    "deadlock in a step": "deadlock",
}
"""What strikes: a signal to the scheduler, or a file for the plugin in tests/gpu/sglang_faults.py."""
_DEADLINE_S = 60.0
_LOOK_EVERY_S = 0.02


class Site:
    """A memory server, a journal and a detector; engines come and go."""

    def __init__(self, folder: Path, device: str) -> None:
        self.faults = folder / "faults"
        self.faults.mkdir(parents=True)
        self.store = MemoryStore()
        model = sglang_cpu.write_model(folder / "model", vocabulary=512, context=4096)
        arguments = sglang_cpu.arguments(model, tokens=8192, requests=8)
        if device != "cpu":
            arguments += ["--device", "cuda", "--dtype", "bfloat16", "--attention-backend", "triton"]
            arguments += ["--disable-prefill-cuda-graph", "--mem-fraction-static", "0.5"]
        self.host = SglangHost(
            None,
            arguments,
            folder / "logs",
            owner_pid=os.getpid(),
            python=str(sglang_cpu.need_python()),
            environment={
                **(sglang_cpu.ENVIRONMENT if device == "cpu" else {"HF_HUB_OFFLINE": "1"}),
                "BELAYER_TEST_FAULTS": str(self.faults),
                "PYTHONPATH": os.pathsep.join(
                    filter(None, (write_plugin(folder / "plugins", ROOT), os.environ.get("PYTHONPATH")))
                ),
            },
            memory=MemoryProcess(device, folder / "memory.sock", os.getpid(), log=folder / "memory.log"),
        )

    async def measure(self, incarnation: str, strike: str | signal.Signals) -> dict[str, Any]:
        """Start a main, strike it, and wait for the journal."""
        main = await self.host.start(incarnation, "main")
        writer, _ = await take_over(self.store, ids.worker("w"), "benchmark")
        at = (main.host, main.pid, main.pid_start_ticks, main.address)
        await writer.append(WorkerRegistered(incarnation, "main", *at, "run"), WorkerReady(incarnation, 0))
        scheduler = (await self.host.status()).engines[0].pid
        streaming = asyncio.Event()
        stream = asyncio.create_task(self._stream(main, streaming))
        try:
            await asyncio.wait_for(streaming.wait(), _DEADLINE_S)
            load = os.getloadavg()[0]
            struck_ns = time.time_ns()
            if isinstance(strike, signal.Signals):
                os.kill(scheduler, strike)
            elif strike == "engine":
                os.kill(main.pid, signal.SIGKILL)
            else:
                (self.faults / strike).touch()
            failed, failed_ns = await asyncio.wait_for(self._failure(incarnation), _DEADLINE_S)
            if not isinstance(strike, signal.Signals) and strike != "engine":
                struck_ns = int((self.faults.parent / STRUCK).read_text())
        finally:
            await self.host.kill(main)
            stream.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await stream
        took_s = round((failed_ns - struck_ns) / 1e9, 4)
        return {"s": took_s, "kind": failed.kind, "evidence": failed.evidence[:200], "load_average": round(load, 1)}

    async def _stream(self, main: EngineProcess, streaming: asyncio.Event) -> None:
        """A request that is long enough to be under way when the fault strikes."""
        client, received = self.host.connect(main), 0
        tokens = client.generate("r", [1, 2, 3], Sampling(max_new_tokens=4000))
        try:
            async with contextlib.aclosing(tokens) as batches:
                async for batch in batches:
                    received += len(batch.token_ids)
                    if received > 20:
                        streaming.set()
        except EngineFailedError:
            pass
        finally:
            await client.close()

    async def _failure(self, incarnation: str) -> tuple[FailureDetected, int]:
        while True:
            for recorded in await Reader(self.store, ids.worker("w")).catch_up():
                if isinstance(recorded.event, FailureDetected) and recorded.event.incarnation == incarnation:
                    return recorded.event, recorded.time_ns
            await asyncio.sleep(_LOOK_EVERY_S)


async def _run(options: argparse.Namespace) -> None:
    site = Site(options.folder, options.device)
    actor = Detector(site.store, site.host, host_name(), "detector")
    detector = asyncio.create_task(run_actor(site.store, actor, host_name(), "c1"))
    for number, name in enumerate((options.faults or [*FAULTS]) * options.rounds):
        measured = await site.measure(f"w-{number}", FAULTS[name])
        print(name, json.dumps(measured), flush=True)
        if options.out is not None:
            _keep(options.out, name, measured, options.device)
    detector.cancel()
    await asyncio.gather(detector, return_exceptions=True)


def _keep(path: Path, name: str, measured: dict[str, Any], device: str) -> None:
    """Add it to what the file has of earlier runs."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    section = kept.setdefault("from_fault_to_failure_detected", {"faults": {}})
    section["machine"] = {"cores": os.cpu_count(), "kernel": platform.release(), "engine": f"real SGLang on {device}"}
    section["faults"].setdefault(name, []).append(measured)
    path.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.detection", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder for sockets, logs and the model")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=", ".join(FAULTS))
    options = parser.parse_args()
    if unknown := set(options.faults) - set(FAULTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(FAULTS)}")
    asyncio.run(_run(options))


if __name__ == "__main__":
    main()
