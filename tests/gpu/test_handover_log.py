"""The log of a new main says when its first batches and tokens went out; the handover benchmark keeps that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.handover_log import add, first_steps, of_shadows, parts

RESULT = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "handover-32b.json"
LOGS = """
===== main.log
[2026-11-30 14:40:22] belayer: a batch of 1, 0.0159 s after it served
[2026-11-30 14:40:22] belayer: tokens of 1, 0.1827 s after it served
===== memory.log
===== shadow10.log
[2026-11-30 14:41:40] belayer: armed
[2026-11-30 14:42:33] belayer: a batch of 64, 0.0134 s after it served
[2026-11-30 14:42:33] belayer: a batch of 64, 0.0205 s after it served
[2026-11-30 14:42:33] belayer: tokens of 64, 0.0487 s after it served
===== shadow3.log
[2026-11-30 14:41:50] belayer: armed
===== shadow2.log
[2026-11-30 14:41:54] belayer: a batch of 64, 0.0003 s after it served
[2026-11-30 14:41:54] belayer: tokens of 64, 0.0354 s after it served
"""
"""From a run on one H200. Shadow 3 never became the main."""


def kill(promoted_s: float, waits_s: list[float]) -> dict[str, object]:
    return {"promoted_s": promoted_s, "waits_s": waits_s}


def test_each_kill_gets_the_first_steps_of_its_own_new_main() -> None:
    assert [steps["launched_s"] for steps in of_shadows(LOGS)] == [0.0003, 0.0134], "in the order of their numbers"
    kills = [kill(0.14, [0.179] * 64), kill(0.03, [0.0837] * 64)]
    run = {"stages": {"kills": {"by_kind": {"late": {"kills": kills[:1]}, "early": {"kills": kills[1:]}}}}}
    add(run, LOGS)
    assert parts(kills[1:]) == {
        "until_it_serves_s": 0.03,
        "until_its_first_batch_s": 0.0134,
        "first_step_s": 0.0353,
        "tokens_way_back_s": 0.005,
    }
    assert first_steps("[2026-11-30 14:41:50] belayer: armed") == {} and parts([{"first_steps": {}}]) == {}


def test_logs_of_another_run_are_refused() -> None:
    kills = [kill(0.14, [0.179] * 64), kill(0.03, [0.0837] * 16)]
    run = {"stages": {"kills": {"by_kind": {"late": {"kills": kills}}}}}
    with pytest.raises(ValueError, match="16 streams went on, but the log says 64"):
        add(run, LOGS)
    kills.append(kill(0.1, []))
    with pytest.raises(ValueError, match="3 kills"):
        add(run, LOGS)


def test_the_parts_of_the_kept_run_add_up_to_what_the_callers_waited() -> None:
    for name, kind in json.loads(RESULT.read_text())["stages"]["kills"]["by_kind"].items():
        assert kind["parts"] == parts(kind["kills"])
        assert sum(kind["parts"].values()) == pytest.approx(kind["kill_to_token_p50_s"], abs=0.004), name
