"""Draw a handover benchmark's phases as SVG: `python -m benchmarks.plot_handover RESULTS.json > handover.svg`.

One bar for each kind of kill (mode, streams x context): medians over its kills, from the kill to the next token of the
median stream. What lies between the shadow's last phase and that token is one step of the model and the way back.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

PHASES = (
    ("known", "death known", "#b0bec5"),
    ("mapped", "lease granted, access changed", "#8d6e63"),
    ("adopted", "KV cache adopted", "#f9a825"),
    ("waited", "waiting for the dead process's end", "#c62828"),
    ("token", "first step, and its tokens to the caller", "#1565c0"),
)
_LEFT, _WIDTH, _BAR, _GAP, _TOP = 130, 560, 18, 10, 64


def phases_s(kill: dict[str, Any]) -> dict[str, float]:
    """Seconds that each phase took, in order; together they are the median stream's wait."""
    phase = kill["phases"]
    found = {
        "known": kill["dying_s"],
        "mapped": phase.get("prove_s", 0.0) + phase.get("map_s", 0.0),
        "adopted": phase.get("adopt_s", 0.0),
        "waited": phase.get("wait_s", 0.0) + phase.get("unlock_s", 0.0),
    }
    return found | {"token": max(0.0, statistics.median(kill["waits_s"]) - sum(found.values()))}


def medians(kills: list[dict[str, Any]]) -> dict[str, float]:
    each = [phases_s(kill) for kill in kills]
    return {name: statistics.median(one[name] for one in each) for name, _, _ in PHASES}


def draw(title: str, kinds: dict[str, dict[str, float]]) -> str:
    """The picture, self-contained."""
    longest_s = max(sum(phases.values()) for phases in kinds.values())
    scale = _WIDTH / longest_s
    bottom = _TOP + len(kinds) * (_BAR + _GAP)
    height = bottom + 22 + 16 * len(PHASES)
    font = 'font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 70}" height="{height}" {font}>']
    parts += ['<rect width="100%" height="100%" fill="white"/>', f'<text x="10" y="22" font-size="14">{title}</text>']
    step_s = 0.05 if longest_s > 0.12 else 0.01
    for tick in range(int(longest_s / step_s) + 1):
        x = _LEFT + tick * step_s * scale
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#e0e0e0"/>')
        parts.append(f'<text x="{x:.1f}" y="{_TOP - 14}" text-anchor="middle">{tick * step_s:.2f} s</text>')
    for number, (name, phases) in enumerate(kinds.items()):
        y, x = _TOP + number * (_BAR + _GAP), float(_LEFT)
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{name}</text>')
        for phase, _, colour in PHASES:
            width = phases[phase] * scale
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>')
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{sum(phases.values()):.3f} s</text>')
    for number, (_, meaning, colour) in enumerate(PHASES):
        y = bottom + 14 + 16 * number
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{_LEFT + 18}" y="{y + 10}">{meaning}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    results = json.loads(Path(sys.argv[1]).read_text())
    by_kind = results["stages"]["kills"]["by_kind"]
    kinds = {name: medians(kind["kills"]) for name, kind in sorted(by_kind.items())}
    model = {"4b": "Qwen3-4B", "32b": "Qwen3-32B"}.get(results["options"]["shape"], results["options"]["shape"])
    gpus = results["machine"]["gpu"].splitlines() or ["CPU"]
    device = f"{len(gpus)} x {gpus[0]}" if len(gpus) > 1 else gpus[0]
    print(draw(f"From the kill to the next token: {model} shape, {device}", kinds), end="")


if __name__ == "__main__":
    main()
