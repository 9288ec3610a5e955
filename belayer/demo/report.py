"""What a demo run came to, as data: for the table, for `--json` and for the exit code."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from belayer.demo.compare import Difference
from belayer.demo.failures import Planned
from belayer.demo.measures import Cost, Recovery

NO_COST = Cost(0, 0)


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run of one trajectory. An undisturbed run has no failures."""

    trajectory: str
    label: str
    wall_s: float
    turns: int
    recoveries: Sequence[Recovery] = ()
    missed: Sequence[Planned] = ()
    """Failures that found no instant to strike before the trajectory ended."""
    cost: Cost = NO_COST
    differences: Sequence[Difference] = ()
    problem: str = ""
    """Why the run did not come to its end, if it did not."""

    @property
    def equal(self) -> bool:
        return not self.differences and not self.problem


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The whole demo."""

    seed: int
    runs: Sequence[RunReport]
    findings: Sequence[str]
    """The audit's."""
    events: int
    wall_s: float
    export: Path | None = None
    timelines: Sequence[Path] = ()
    kept: Path | None = None
    trajectories: Sequence[str] = field(default=())

    @property
    def recoveries(self) -> list[Recovery]:
        return [recovery for run in self.runs for recovery in run.recoveries]

    @property
    def by_kind(self) -> dict[str, list[Recovery]]:
        found: dict[str, list[Recovery]] = {}
        for recovery in self.recoveries:
            found.setdefault(recovery.kind, []).append(recovery)
        return found

    @property
    def recovery_s(self) -> list[float]:
        """From kill to resumption, of every failure, sorted."""
        return sorted(recovery.resumed_s for recovery in self.recoveries if recovery.resumed_s is not None)

    @property
    def missed(self) -> list[Planned]:
        return [planned for run in self.runs for planned in run.missed]

    @property
    def good(self) -> bool:
        """Every run ended as the undisturbed one and the audit found nothing. Failures that missed are not wrong."""
        return all(run.equal for run in self.runs) and not self.findings

    def as_json(self) -> dict[str, Any]:
        """One flat object; `details` names whatever is not good."""
        waits_s = self.recovery_s
        details = [f"{run.trajectory} {run.label}: {run.problem}" for run in self.runs if run.problem]
        details += [f"{run.trajectory} {run.label}: {one}" for run in self.runs for one in run.differences]
        details += [
            f"{run.trajectory} {run.label}: {planned.kind} found no instant to strike"
            for run in self.runs
            for planned in run.missed
        ]
        return {
            "trajectories": len(self.trajectories),
            "runs": len(self.runs),
            "failures": len(self.recoveries),
            "missed": len(self.missed),
            "equal": all(run.equal for run in self.runs),
            "recovery_p50_s": round(statistics.median(waits_s), 3) if waits_s else None,
            "recovery_worst_s": round(waits_s[-1], 3) if waits_s else None,
            "recovery_by_kind": {kind: _by_phase(found) for kind, found in sorted(self.by_kind.items())},
            "tokens_again": sum(run.cost.tokens_again for run in self.runs),
            "actions_again": sum(run.cost.actions_again for run in self.runs),
            "findings": len(self.findings),
            "events": self.events,
            "seed": self.seed,
            "wall_s": round(self.wall_s, 1),
            "export": str(self.export) if self.export else None,
            "timelines": [str(page) for page in self.timelines],
            "details": [*details, *self.findings],
        }


def _by_phase(recoveries: Sequence[Recovery]) -> dict[str, float | int | None]:
    """Medians of the phases, and the worst of the whole; null where a phase does not apply."""
    phases: dict[str, float | int | None] = {"count": len(recoveries)}
    for phase in ("detected_s", "recovered_s", "resumed_s"):
        known = [value for recovery in recoveries if (value := getattr(recovery, phase)) is not None]
        phases[phase] = round(statistics.median(known), 3) if known else None
        phases["worst_s"] = round(max(known), 3) if known else None
    return phases
