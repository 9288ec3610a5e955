"""The capacity page says what the formula says, and the formula what its parts do."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.capacity import CONTROL_BYTES, DAY_S, OBSERVED_BYTES, Measured, Run, cost_of, read_measured, table

PAGE = Path(__file__).parents[2] / "docs" / "capacity.md"
MEASURED = Measured(
    chunk_bytes=2560.0,
    server_bytes_per_token=11.0,
    client_cpu_us_per_chunk=10.0,
    server_chunks_per_s=50_000.0,
    compression=2.0,
    left_per_trajectory_bytes=1000.0,
    archiver_bytes_per_s=100e6,
)


def test_the_page_has_the_figures() -> None:
    """Within 30 %: the benchmarks' own figures move between runs."""
    lines = {line.split("|")[1].strip(): line.split("|")[2] for line in PAGE.read_text().splitlines() if "|" in line}
    for what, much, _ in table(Run(), cost_of(Run(), read_measured())):
        said, found = (re.search(r"([\d,.]+) ?(\S*)", text) for text in (lines[what], much))
        assert said is not None and found is not None
        assert said[2] == found[2], f"{what}: run `python -m benchmarks.capacity --markdown`"
        expected = float(found[1].replace(",", ""))
        assert float(said[1].replace(",", "")) == pytest.approx(expected, rel=0.3, abs=2.0), what


def test_the_formula_by_hand() -> None:
    run = Run(10, 100.0, 8, 1000, 0.0, 250, 10.0, 2)
    cost = cost_of(run, replace(MEASURED, chunk_bytes=2500.0))
    assert cost.tokens_day == 1000 * DAY_S
    assert cost.trajectories_day == DAY_S
    assert cost.server_open_bytes == 8 * 500 * 11
    assert cost.server_ended_bytes == 1000 * 10 * 11
    assert cost.server_marks_bytes == DAY_S * 2 * 1000
    assert cost.server_bytes == 8 * 500 * 11 + 110_000 + DAY_S * 2000 + CONTROL_BYTES
    assert cost.append_bytes_per_s == 1000 * 10 + 4 * 110
    assert cost.archive_day_bytes == 1000 * 10 * DAY_S / 2
    assert cost.client_cores == pytest.approx(4e-5)


def test_twice_the_run_costs_twice_and_observations_count() -> None:
    one, two = cost_of(Run(), MEASURED), cost_of(Run(gpus=2000, concurrent=8192), MEASURED)
    assert two.server_bytes - CONTROL_BYTES == pytest.approx(2 * (one.server_bytes - CONTROL_BYTES))
    assert two.archive_day_bytes == pytest.approx(2 * one.archive_day_bytes)
    bare = cost_of(Run(observed_share=0.0), MEASURED)
    assert one.archive_read_bytes_per_s - bare.archive_read_bytes_per_s == pytest.approx(640_000 * OBSERVED_BYTES)
