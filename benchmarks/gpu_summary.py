"""What scripts/gpu_measure.sh has found: `python -m benchmarks.gpu_summary FOLDER` or `--all OUT_DIR`.

Of one stage's folder: its figures as one JSON line; exits with 1 and says why when something of it is missing. Of all:
one JSON object with the figures of every stage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any


def figures(folder: Path) -> dict[str, Any]:
    """Of one stage, whatever there is of it; `missing` says what went wrong."""
    if (folder / "detection.json").exists():
        found = json.loads((folder / "detection.json").read_text())["from_fault_to_failure_detected"]["faults"]
        seconds = {name: [each["s"] for each in measured] for name, measured in found.items()}
        return {name: {"p50_s": statistics.median(took), "worst_s": max(took)} for name, took in seconds.items()}
    if not (folder / "handover.json").exists():
        return {"missing": ["handover.json: see run.log"]}
    results = json.loads((folder / "handover.json").read_text())
    stages = results.pop("stages")
    kinds: dict[str, dict[str, Any]] = results.get("by_kind", {})
    missing = [f"{name}: {stage['error'][-300:]}" for name, stage in stages.items() if "error" in stage]
    missing += [f"{kill['kind']}: {kill['error'][-300:]}" for kill in stages.get("kills", {}).get("failed_kills", [])]
    missing += [f"{name}: no stream was left to resume" for name, kind in kinds.items() if not kind["kills_made"]]
    if "by_kind" not in results:
        missing.append("the end: it was interrupted")
    found = {name: value for name, value in results.items() if value not in (None, {}) and name != "options"}
    return found | ({"missing": missing} if missing else {})


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_summary", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    if options.all:
        stages = sorted(path.parent for path in options.folder.glob("*/command"))
        print(json.dumps({stage.name: figures(stage) for stage in stages}, indent=1))
        return
    found = figures(options.folder)
    print(json.dumps(found))
    sys.exit(1 if "missing" in found else 0)


if __name__ == "__main__":
    main()
