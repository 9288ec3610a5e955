"""What a dead engine's ledger proves goes into SGLang's own radix tree, each slot once, or nothing does."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.gpu.sglang_cell import PYTHON, ROOT

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not PYTHON, reason="SGLang is not installed; run scripts/sglang_cpu.sh"),
]


def test_every_slot_is_in_the_tree_once_or_free_and_a_contradiction_adopts_nothing() -> None:
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [PYTHON, "-m", "tests.gpu.adoption_child"]
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True)
    cases = json.loads(said.stdout.splitlines()[-1])
    assert [case["wrong"] for case in cases] == [""] * 200
    assert [case["adopted"] > 0 for case in cases] == [not case["contradicts"] for case in cases]
