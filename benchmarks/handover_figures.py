"""What the handover benchmark makes of its measurements: figures, pure functions of what was recorded."""

from __future__ import annotations

import json
import statistics
from typing import Any


def agreement(expected: list[list[int]], got: list[list[int]], before: list[int] | None = None) -> dict[str, Any]:
    """How many streams are equal token by token, and where the others part.

    `before`: what each stream had when its engine was killed. Then also: of the streams that were equal until there,
    how many stayed so. (In bf16 two undisturbed runs differ, because their prefill batches do.)
    """
    parts: list[int] = []
    until = 0
    for one, other, had in zip(expected, got, before or [0] * len(got), strict=True):
        until += one[:had] == other[:had]
        if one != other:
            parts.append(
                next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
            )
    found = {"streams": len(expected), "equal": len(expected) - len(parts), "first_difference": sorted(parts)[:8]}
    return found | ({"equal_until_kill": until} if before else {})


def summary(kills: list[dict[str, Any]]) -> dict[str, Any]:
    waits = sorted(wait for kill in kills for wait in kill["waits_s"])
    worst = [kill["waits_s"][-1] for kill in kills if kill["waits_s"]]
    if not waits:
        return {}
    return {
        "kills_made": len(kills),
        "kill_to_token_p50_s": round(statistics.median(waits), 4),
        "kill_to_token_p99_s": waits[min(len(waits) - 1, int(0.99 * len(waits)))],
        "kill_to_token_worst_s": waits[-1],
        "kill_to_last_stream_p50_s": round(statistics.median(worst), 4),
        "dead_p50_s": round(statistics.median(kill["dead_s"] for kill in kills), 4),
        "dying_p50_s": round(statistics.median(kill["dying_s"] for kill in kills), 4),
        "promoted_p50_s": round(statistics.median(kill["promoted_s"] for kill in kills), 4),
        "equal_streams": sum(kill["equal"]["equal"] for kill in kills),
        "equal_until_kill": sum(kill["equal"]["equal_until_kill"] for kill in kills),
        "all_streams": sum(kill["equal"]["streams"] for kill in kills),
    }


def without_tokens(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "token_ids"}


def brief(found: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in found.items() if not isinstance(value, list)})[:900]


def headline(stages: dict[str, Any]) -> dict[str, Any]:
    """The figures of the last line, from whatever stages there are. Handovers: those of the first kind planned."""
    plain, steady = stages.get("plain", {}), stages.get("steady", {})
    kills = stages.get("kills", {})
    by_kind: dict[str, dict[str, Any]] = kills.get("by_kind", {})
    first = next(iter(by_kind.values()), {})
    everything = stages.get("everything", {})
    engine_ratio = everything.get("ours_ratio")
    if "each" in plain and "each" in steady:
        engine_ratio = round(steady["tokens_per_s"] / plain["tokens_per_s"], 4)
    ours, theirs = stages.get("update", {}), plain.get("update", {})
    took_s = {how: (ours.get(f"{how}_s", []), theirs.get(f"{how}_s", [])) for how in ("tensor", "disk", "distributed")}
    took_s |= {how: (pair["ours_s"], pair["plain_s"]) for how, pair in stages.get("pair", {}).items() if how in took_s}
    updates = {
        how: round(statistics.median(ours_s[1:]) / statistics.median(plain_s[1:]), 4)
        for how, (ours_s, plain_s) in took_s.items()
        if len(ours_s) > 1 and len(plain_s) > 1
    }
    adopted = [kind for name, kind in by_kind.items() if not name.startswith("refill")]
    figures = {"all": "all_streams", "until_kill": "equal_until_kill", "to_the_end": "equal_streams"}
    streams = {figure: sum(kind.get(name, 0) for kind in adopted) for figure, name in figures.items()}
    return {
        "kill_to_token_p50_s": first.get("kill_to_token_p50_s"),
        "kill_to_token_p99_s": first.get("kill_to_token_p99_s"),
        "kill_to_token_worst_s": first.get("kill_to_token_worst_s"),
        "by_kind": {
            name: {figure: kind.get(figure) for figure in ("kill_to_token_p50_s", "kill_to_token_p99_s", "kills_made")}
            for name, kind in by_kind.items()
        },
        "cold_start_s": plain.get("cold_start_s"),
        "shadow_gpu_gb": kills.get("shadow_gpu_gb"),
        "throughput_ratio": everything.get("everything_ratio", engine_ratio),
        "throughput_engine_alone_ratio": engine_ratio,
        "weight_update_ratio": updates.get("tensor"),
        "weight_update_from_disk_ratio": updates.get("disk"),
        "weight_update_by_broadcast_ratio": updates.get("distributed"),
        "rearm_throughput_ratio": stages.get("rearm", {}).get("ratio"),
        "weight_cache_start_s": stages.get("cache", {}).get("start_s"),
        "streams_equal": streams,
        "equal": streams["until_kill"] == streams["to_the_end"] if adopted else None,
    }
