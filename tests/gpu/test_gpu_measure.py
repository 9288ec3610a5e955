"""scripts/gpu_measure.sh plans the whole matrix and leaves out what is done; what is not whole is not done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_summary import figures
from benchmarks.handover_figures import headline

ROOT = Path(__file__).resolve().parents[2]


def planned(*arguments: str) -> dict[str, str]:
    """What --plan says of each stage."""
    done = subprocess.run(
        [ROOT / "scripts/gpu_measure.sh", *arguments, "--plan"], capture_output=True, text=True, check=True
    )
    lines = [line.removeprefix("belayer: ").split(maxsplit=1) for line in done.stderr.splitlines()]
    return {name: state for name, state in lines if name != "about"}


def test_the_plan_is_the_whole_matrix_without_what_is_done(tmp_path: Path) -> None:
    stages = planned(str(tmp_path))
    loads = ["1x2048", "1x8192", "16x2048", "16x8192", "64x2048"]
    expected = {f"kills-{shape}-{load}" for shape in ("4b", "32b") for load in loads} | {"kills-4b-64x8192"}
    kinds = ("zombie", "throughput", "update", "start", "equal")
    expected |= {f"{kind}-{shape}" for kind in kinds for shape in ("4b", "32b")} | {"detection"}
    assert set(stages) == expected
    assert set(planned(str(tmp_path), "--tp")) - expected == {"tp2-4b", "tp2-32b", "update-nccl"}
    (tmp_path / "zombie-4b").mkdir()
    (tmp_path / "zombie-4b" / "done").touch()
    assert planned(str(tmp_path), "--only", "kills-4b-1x8192", "--each", "5") == {"kills-4b-1x8192": "about 6 min"}
    assert planned(str(tmp_path), "--only", "zombie-*") == {"zombie-4b": "done", "zombie-32b": "about 5 min"}


@pytest.mark.parametrize("arguments", ["--device gpu", "--shape 70b", "--each 0", "--what", "--only", ""])
def test_what_it_does_not_understand_is_refused(arguments: str, tmp_path: Path) -> None:
    out = [str(tmp_path)] if arguments else []
    done = subprocess.run([ROOT / "scripts/gpu_measure.sh", *out, *arguments.split()], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stdout == ""


WHOLE: dict[str, Any] = {"by_kind": {}, "throughput_ratio": 1.0, "equal": None, "stages": {"plain": {"took_s": 1.0}}}
KILL = {"kind": "late 1x8", "error": "TimeoutError: "}


@pytest.mark.parametrize(
    ("results", "missing"),
    [
        (WHOLE, None),
        (WHOLE | {"stages": {"plain": {"error": "RuntimeError: no room"}}}, "plain: RuntimeError: no room"),
        (WHOLE | {"stages": {"kills": {"failed_kills": [KILL]}}}, "late 1x8: TimeoutError: "),
        (WHOLE | {"by_kind": {"late 1x8": {"kills_made": None}}}, "late 1x8: no stream was left to resume"),
        ({"stages": {}}, "the end: it was interrupted"),
        (None, "handover.json: see run.log"),
    ],
)
def test_a_stage_is_done_only_when_nothing_of_it_is_missing(
    results: dict[str, Any] | None, missing: str | None, tmp_path: Path
) -> None:
    folder = tmp_path / "a-stage"
    folder.mkdir()
    (folder / "command").touch()
    if results is not None:
        (folder / "handover.json").write_text(json.dumps(results))
    found = figures(folder)
    assert found.get("missing") == (None if missing is None else [missing])
    command = [sys.executable, "-m", "benchmarks.gpu_summary"]
    done = subprocess.run([*command, folder], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, json.loads(done.stdout)) == (0 if missing is None else 1, found)
    all_of_it = subprocess.run([*command, "--all", tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert json.loads(all_of_it.stdout) == {"a-stage": found}


def test_the_benchmarks_last_line_has_every_figure_and_throughput_with_everything_on_where_it_was_measured() -> None:
    keys = {"kill_to_token_p50_s", "kill_to_token_p99_s", "cold_start_s", "shadow_gpu_gb", "throughput_ratio"}
    assert headline({}).keys() >= keys | {"weight_update_ratio", "equal"}
    alone = {"steady": {"tokens_per_s": 99.0, "each": [99.0]}, "plain": {"tokens_per_s": 100.0, "each": [100.0]}}
    assert headline(alone)["throughput_ratio"] == headline(alone)["throughput_engine_alone_ratio"] == 0.99
    whole = headline(alone | {"everything": {"everything_ratio": 0.97, "ours_ratio": 0.98}})
    assert (whole["throughput_ratio"], whole["throughput_engine_alone_ratio"]) == (0.97, 0.99)
