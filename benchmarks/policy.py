"""Replays the time stamps of recorded trajectories under checkpoint policies: overhead and lost work, in expectation.

    python -m benchmarks.policy --trajectories DIR [--json] [--failure-rate 0.01] [--checkpoint-s 0.3]

For each trajectory, generation and action times come from the recording. A checkpoint taken at a boundary runs while
the next generation does; what it takes beyond that delays the next action. Each action fails with the given
probability, which loses the work since the newest checkpoint and costs one restore. Expected values are computed, not
sampled; the offline optimum knows all times in advance and minimises the same sum by dynamic programming. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from belayer.actors.policy import CheckpointHistory, Outlook, decide
from belayer.projections.tempo import RECENT

RESTORE_S = 0.5


@dataclass(frozen=True)
class Timing:
    """n turns: generation_s[i], then action_s[i], then boundary i + 1."""

    name: str
    generation_s: list[float]
    action_s: list[float]

    @property
    def total_s(self) -> float:
        return sum(self.generation_s) + sum(self.action_s)


@dataclass(frozen=True)
class Cost:
    """Expected seconds on top of the undisturbed run."""

    delay_s: float
    lost_s: float
    checkpoints: int

    @property
    def total_s(self) -> float:
        return self.delay_s + self.lost_s


def read_timing(path: Path) -> Timing:
    """Generation and action times of a mini-swe-agent recording that has time stamps."""
    generation_s: list[float] = []
    action_s: list[float] = []
    last = begun = 0.0
    for message in json.loads(path.read_text())["messages"]:
        at = message.get("extra", {}).get("timestamp")
        if at is None:
            continue
        if message["role"] == "assistant":
            begun = last or message["extra"].get("response", {}).get("created", at)
            generation_s.append(max(0.0, at - begun))
            action_s.append(0.0)
        elif action_s:
            action_s[-1] += max(0.0, at - last)
        last = at
    return Timing(path.name.removesuffix(".traj.json"), generation_s, action_s)


def cost(timing: Timing, chosen: list[bool], rate: float, checkpoint_s: float) -> Cost:
    """The expected cost of checkpointing at the chosen boundaries (`chosen[i]`: after turn i)."""
    turns = [a + b for a, b in zip(timing.generation_s, timing.action_s, strict=True)]
    delay = lost = since = 0.0
    for turn, (turn_s, here) in enumerate(zip(turns, chosen, strict=True)):
        since += turn_s
        lost += rate * (since + RESTORE_S)
        if here and turn + 1 < len(turns):
            delay += max(0.0, checkpoint_s - timing.generation_s[turn + 1])
            since = 0.0
    return Cost(delay, lost, sum(chosen[:-1]))


def adaptive(timing: Timing, rate: float, checkpoint_s: float) -> list[bool]:
    """What the policy decides, seeing only the past."""
    history = CheckpointHistory()
    since = now = 0.0
    actions = 0
    chosen: list[bool] = []
    for turn, (took_s, action_s) in enumerate(zip(timing.generation_s, timing.action_s, strict=True), 1):
        since += took_s + action_s
        actions += 1
        now += took_s + action_s
        here = decide(
            Outlook(since, actions, tuple(timing.generation_s[max(0, turn - RECENT) : turn]), now, rate), history
        )
        chosen.append(here)
        if here:
            history, since, actions = history.took(checkpoint_s), 0.0, 0
    return chosen


def optimum(timing: Timing, rate: float, checkpoint_s: float) -> list[bool]:
    """The boundaries that minimise the expected cost, all times being known: shortest path over the last checkpoint."""
    turns = [a + b for a, b in zip(timing.generation_s, timing.action_s, strict=True)]
    n = len(turns)
    reached = [0.0, *accumulate(turns)]
    best: list[float] = [0.0] + [float("inf")] * n
    previous = [0] * (n + 1)
    for start in range(n):
        pays = max(0.0, checkpoint_s - timing.generation_s[start]) if start else 0.0
        running = best[start] + pays
        for end in range(start + 1, n + 1):
            running += rate * (reached[end] - reached[start] + RESTORE_S)
            if running < best[end]:
                best[end], previous[end] = running, start
    chosen = [False] * n
    at = previous[n]
    while at:
        chosen[at - 1] = True
        at = previous[at]
    return chosen


def policies(rate: float, checkpoint_s: float) -> dict[str, Callable[[Timing], list[bool]]]:
    """The policies to compare, by name."""

    def every(n: int) -> Callable[[Timing], list[bool]]:
        return lambda timing: [(turn + 1) % n == 0 for turn in range(len(timing.generation_s))]

    return {
        "never": lambda timing: [False] * len(timing.generation_s),
        "every boundary": every(1),
        "every 5th": every(5),
        "every 10th": every(10),
        "adaptive": lambda timing: adaptive(timing, rate, checkpoint_s),
        "offline optimum": lambda timing: optimum(timing, rate, checkpoint_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=Path, default=Path("examples/trajectories"))
    parser.add_argument("--failure-rate", type=float, default=0.01)
    parser.add_argument("--checkpoint-s", type=float, nargs="+", default=[0.1, 1.0, 5.0, 20.0])
    parser.add_argument("--json", action="store_true", help="only the last line")
    arguments = parser.parse_args()
    timings = [read_timing(path) for path in sorted(arguments.trajectories.glob("*.traj.json"))]
    if not timings:
        parser.error(f"no *.traj.json in {arguments.trajectories}")
    total_s = sum(timing.total_s for timing in timings)
    report: dict[str, dict[str, dict[str, float]]] = {}
    for checkpoint_s in arguments.checkpoint_s:
        rows = report[f"{checkpoint_s:g}"] = {}
        for name, policy in policies(arguments.failure_rate, checkpoint_s).items():
            costs = [cost(t, policy(t), arguments.failure_rate, checkpoint_s) for t in timings]
            rows[name] = {
                "delay": sum(c.delay_s for c in costs) / total_s,
                "lost": sum(c.lost_s for c in costs) / total_s,
                "increase": sum(c.total_s for c in costs) / total_s,
                "checkpoints_median": statistics.median(c.checkpoints for c in costs),
            }
            if not arguments.json:
                row = rows[name]
                print(
                    f"checkpoint {checkpoint_s:5.1f} s  {name:16} delay {row['delay']:8.4%}  lost {row['lost']:8.4%}"
                    f"  rollout time +{row['increase']:8.4%}  checkpoints {row['checkpoints_median']:g}"
                )
    print(json.dumps({"trajectories": len(timings), "failure_rate": arguments.failure_rate, "policies": report}))


if __name__ == "__main__":
    main()
