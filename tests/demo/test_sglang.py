"""The demo with a real SGLang on the CPU: its scheduler dies in mid-stream, the shadow adopts its KV cache and goes on.

`make test` brings SGLang; without it this is skipped.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from belayer.demo.failures import Kind
from belayer.demo.run import Options, run_demo
from belayer.gpu import sglang_cpu
from belayer.journal.codec import decode_entry
from belayer.journal.events import HandoverCompleted
from belayer.journal.export import read_export
from tests.demo.test_chaos import NAME, SHIPPED, Notes
from tests.waiting import within

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.sglang,
    pytest.mark.skipif(sglang_cpu.find_python() is None, reason="SGLang is not installed; run scripts/sglang_cpu.sh"),
]


async def test_killed_in_mid_stream_it_says_the_same_tokens(tmp_path: Path) -> None:
    document = json.loads((SHIPPED / f"{NAME}.traj.json").read_text())
    said = [message for message in document["messages"] if message["role"] == "assistant"]
    document["messages"] = [*document["messages"][:2], *said[:6]]
    (folder := tmp_path / "trajectories").mkdir()
    (folder / f"{NAME}.traj.json").write_text(json.dumps(document))
    options = Options(folder, (Kind.ENGINE,), runs=1, seed=3, engine="sglang", results=tmp_path / "results")
    report = await within(run_demo(options, Notes()), 1200.0)
    assert report.as_json()["details"] == []
    assert report.good and [recovery.kind for recovery in report.recoveries] == [Kind.ENGINE]
    assert report.export is not None
    handovers = [
        recorded.event
        for stream, entry in read_export(report.export)
        for recorded in decode_entry(stream, entry.epoch, entry.last_sequence, entry.body)
        if isinstance(recorded.event, HandoverCompleted)
    ]
    assert len(handovers) == 1 and handovers[0].adopted_tokens > 0
    phases = list(handovers[0].phases_s)
    assert phases[:2] == ["fence", "prove"] and {"map", "adopt"} <= set(phases) and phases[-1] == "serve"
    page = report.timelines[0].read_text()
    assert "adopted" in page and "took over (fence" in page
