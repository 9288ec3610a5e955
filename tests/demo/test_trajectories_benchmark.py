"""The arithmetic of benchmarks.trajectories: what one failure cost becomes the increase at 1 %."""

import pytest

from benchmarks.trajectories import Figures, figures_of, find_subjects


def test_increases_are_rate_times_actions_times_cost_over_the_undisturbed_time() -> None:
    lost_s = {"belayer": [1.0, 3.0], "restart": [50.0, 50.0], "replay": [20.0, 20.0]}
    one = Figures(actions=50, alone_s=[99.0, 101.0], belayer_s=[101.0, 101.0], lost_s=lost_s, trials=2, equal=2)
    report = figures_of([one])
    assert report["failure_free_overhead"] == pytest.approx(0.01)
    assert report["failures_increase_1pct"] == pytest.approx(0.01 * 50 * 2.0 / 100)
    assert report["rollout_increase_1pct"] == pytest.approx(0.02)
    assert report["restart_increase_1pct"] == pytest.approx(0.25)
    assert (report["trials"], report["equal"], report["actions"]) == (2, 2, 50)


def test_longer_trajectories_weigh_more() -> None:
    lost_s = {"belayer": [1.0], "restart": [10.0], "replay": [5.0]}
    none_s = {"belayer": [0.0], "restart": [0.0], "replay": [0.0]}
    long = Figures(actions=90, alone_s=[900.0], belayer_s=[900.0], lost_s=none_s, trials=1, equal=1)
    short = Figures(actions=10, alone_s=[100.0], belayer_s=[100.0], lost_s=lost_s, trials=1, equal=0)
    report = figures_of([long, short])
    assert report["restart_increase_1pct"] == pytest.approx(0.001)
    assert (report["trials"], report["equal"]) == (2, 1)


def test_the_shipped_trajectories_come_first() -> None:
    names = [subject.name for subject, _ in find_subjects(3, 0)]
    assert names == ["django__django-11039", "pydicom__pydicom-1256", "sqlfluff__sqlfluff-2419"]
    assert all(path.exists() and subject.unwatched().spec.setup == () for subject, path in find_subjects(2, 0))
