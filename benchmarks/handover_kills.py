"""The kills of the handover benchmark: main after main dies in mid-stream, each replaced by a waiting shadow."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from typing import Any

from belayer.gpu import wire
from belayer.gpu.memory_client import MemoryClient
from belayer.gpu.protocol import EngineProcess
from benchmarks.handover_bench import ROOT, Bench, gpu_processes
from benchmarks.handover_figures import agreement, summary
from benchmarks.handover_loads import Kill
from benchmarks.handover_log import first_steps, parts

_KILL_LIMIT_S = 90.0


async def kills(bench: Bench, found: dict[str, Any]) -> None:
    """As planned, with shadows that were started beforehand, many at a time."""
    plan: list[Kill] = list(bench.options.kills)
    by_kind: dict[str, dict[str, Any]] = {}
    found |= {"waves": [], "failed_starts": [], "failed_kills": [], "by_kind": by_kind}
    chosen = random.Random(23)
    while plan and len(found["failed_kills"]) < 3:
        began_s = time.monotonic()
        wave, bench.first_wave = bench.first_wave, None
        started = await (wave or bench.shadows(min(len(plan), bench.options.wave)))
        shadows = [shadow for shadow in started if isinstance(shadow, EngineProcess)]
        found["failed_starts"] += [str(error)[-800:] for error in started if error not in shadows]
        if not shadows:
            raise RuntimeError("no shadow could be started")
        gpu = gpu_processes()
        found["waves"].append({"shadows": len(shadows), "s": round(time.monotonic() - began_s, 2), "gpu": gpu})
        found["shadow_gpu_gb"] = _gpu_gb(gpu, await bench.host.statuses(), shadows)
        found["arm"] = bench.host.facts[shadows[0].incarnation]
        bench.save()
        for shadow in shadows[: len(plan)]:
            kill = plan.pop(0)
            rank = len(plan) % bench.options.tp
            name = f"{kill.mode.name} {kill.load}"
            try:
                async with asyncio.timeout(_KILL_LIMIT_S):
                    await _reference(bench, kill)
                    facts = await _kill(bench, shadow, kill, chosen, rank, profiled=name not in by_kind)
            except Exception as error:  # noqa: BLE001  one kill that went wrong must not lose the others
                found["failed_kills"].append({"kind": name, "error": f"{type(error).__name__}: {error}"[-900:]})
                bench.save()
                continue
            of_kind = by_kind.setdefault(name, {"kills": []})
            of_kind["kills"].append(facts)
            of_kind |= summary(of_kind["kills"]) | {"parts": parts(of_kind["kills"])}
            bench.save()


async def _reference(bench: Bench, kill: Kill) -> None:
    """What the load's streams say undisturbed; and their prompts are cached from then on."""
    if kill.load not in bench.reference:
        assert bench.main is not None
        bench.reference[kill.load] = (await bench.throughput(bench.main, kill.load))["token_ids"]


async def _kill(
    bench: Bench, shadow: EngineProcess, kill: Kill, chosen: random.Random, rank: int, *, profiled: bool
) -> dict[str, Any]:
    """`rank`: the tensor parallel rank whose scheduler is killed."""
    assert bench.main is not None
    host, tokens = bench.host, bench.options.tokens
    host.adopt, host.early = kill.mode.adopt, kill.mode.early
    old, new = host.connect(bench.main), host.connect(shadow)
    run = bench.streams("kill", old, kill.load)
    running = asyncio.create_task(run.run())
    await run.wait_tokens(chosen.randrange(tokens // 8, tokens // 2))
    previous, bench.main = bench.main, shadow
    status = (await host.statuses())[rank]
    scheduler = next(engine.pid for engine in status.engines if engine.holds_arena)
    seen: dict[str, float] = {}
    dying, dead = asyncio.Event(), asyncio.Event()
    watching = asyncio.create_task(_watch(bench, previous.incarnation, seen, dying, dead))
    profile = await asyncio.to_thread(_Profile, scheduler) if profiled else None
    await asyncio.sleep(0.1)
    before = [len(stream.token_ids) for stream in run.streams]
    trigger = bench.zombies / previous.incarnation
    killed_s = time.monotonic()
    if kill.mode.zombie:
        trigger.touch()
    else:
        os.kill(scheduler, 9)
    try:
        await dying.wait()
        promotion = _promote_beside(bench, shadow) if kill.mode.zombie else host.promote(shadow)
        promoting = asyncio.create_task(promotion)
        await asyncio.sleep(0)  # the memory server is asked first: what the streams do keeps this thread busy
        run.change(new)
        await promoting
        promoted_s = time.monotonic()
        await running
        rounds = int(trigger.with_suffix(".rounds").read_text()) if kill.mode.zombie else 0
    finally:
        trigger.unlink(missing_ok=True)
    await dead.wait()
    watching.cancel()
    await old.close()
    await new.close()
    await host.kill(previous)
    waits = sorted(stream.resumed_s[0] - killed_s for stream in run.streams if stream.resumed_s)
    facts = {
        "rank": rank,
        "waits_s": [round(wait, 4) for wait in waits],
        "dying_s": round(seen["dying"] - killed_s, 4),
        "dead_s": round(seen["dead"] - killed_s, 4),
        "promoted_s": round(promoted_s - killed_s, 4),
        "phases": {name: round(value, 5) for name, value in host.facts[shadow.incarnation].items()},
        "tokens_before": sum(before),
        "first_steps": first_steps((bench.logs / f"{shadow.incarnation}.log").read_text(errors="replace")),
        "equal": agreement(bench.reference[kill.load], [stream.token_ids for stream in run.streams], before),
    }
    if kill.mode.zombie:
        facts["zombie_rounds"] = rounds
    if profile is not None:
        facts["teardown"] = [
            [round(at_s - killed_s, 4), what] for at_s, what in await asyncio.to_thread(profile.result)
        ]
    return facts


async def _promote_beside(bench: Bench, shadow: EngineProcess) -> None:
    """Promote early, and leave the old process to itself."""
    with MemoryClient.connect(bench.socket, "benchmark", "control")[0] as client:
        promote = wire.Promote(shadow.incarnation, False, True, True, 30.0)
        answer, _ = await asyncio.to_thread(client.ask, promote, wire.Facts)
    bench.host.facts[shadow.incarnation] = answer.facts


async def _watch(
    bench: Bench, incarnation: str, seen: dict[str, float], dying: asyncio.Event, dead: asyncio.Event
) -> None:
    async for event in bench.host.events():
        if event.incarnation == incarnation:
            seen.setdefault(event.kind, time.monotonic())
            if event.kind in ("dying", "dead"):
                dying.set()
            if event.kind == "dead":
                seen.setdefault("dying", seen["dead"])
                dead.set()


class _Profile:
    """Watches a process being torn down, from another process; in a thread of one's own."""

    def __init__(self, pid: int) -> None:
        command = [sys.executable, "-m", "benchmarks.teardown", str(pid)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def result(self) -> list[tuple[float, str]]:
        """The moments at which it changed."""
        said, _ = self._process.communicate(timeout=30)
        return json.loads(said)


def _gpu_gb(processes: list[str], statuses: list[wire.Status], shadows: list[EngineProcess]) -> float | None:
    """GPU memory of a shadow on each of its GPUs, context included: the median over these."""
    names = {shadow.incarnation for shadow in shadows}
    engines = [engine for status in statuses for engine in status.engines]
    pids = {str(engine.pid) for engine in engines if engine.incarnation in names}
    used = [float(line.split(",")[1].split()[0]) for line in processes[1:] if line.split(",")[0] in pids]
    return round(statistics.median(used) * (1 << 20) / 1e9, 3) if used else None
