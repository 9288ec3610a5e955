"""The long sequence of kills: what has ended is kept, enough is enough, and whatever is wrong shows."""

from pathlib import Path

from belayer.demo.compare import Difference
from belayer.demo.failures import Kind
from belayer.demo.measures import Recovery
from belayer.demo.report import RunReport
from benchmarks.kills import Kept, report_of


def ended(*kinds: Kind, differences: tuple[Difference, ...] = ()) -> RunReport:
    recoveries = [Recovery(kind, "somewhere", 0.01, 0.1, 0.2 + index) for index, kind in enumerate(kinds)]
    return RunReport("t", "failures 2", 9.0, 5, recoveries, differences=differences)


def test_started_again_it_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "seed-1.jsonl"
    kept = Kept(path, 20)
    assert kept.begin("t", 2) and not kept.begin("t", 2)
    kept.keep(2, ended(*Kind))
    again = Kept(path, 20)
    assert again.lines == kept.lines and again.kills == len(Kind)
    assert not again.begin("t", 2)
    assert again.begin("t", 3) and not again.perhaps_enough
    assert again.begin("u", 2) and again.perhaps_enough and again.under_way == 2
    again.keep(3, ended())
    assert not again.perhaps_enough and not again.enough, "one struck nothing"
    again.keep(2, ended(*Kind, *Kind))
    assert again.enough and again.under_way == 0


def test_what_the_runs_came_to(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "seed-1.jsonl", 20)
    kept.keep(2, ended(Kind.REDIS, Kind.IDLE))
    kept.keep(3, ended(Kind.IDLE, differences=(Difference("file /x", "file", "nothing"),)))
    report = report_of(kept.lines, [], [])
    assert (report["trials"], report["equal"], report["kills"]) == (2, 1, 3)
    waits = {"median_s": 0.7, "worst_s": 1.2, "recovered_median_s": 0.1, "recovered_worst_s": 0.1}
    assert report["by_kind"]["container-idle"] == {"kills": 2, **waits}
    assert report["problems"] == ["t 3: file /x: expected file, found nothing"]
    assert report_of(kept.lines, [], ["sequence"])["equal"] == 0, "a journal with findings proves nothing"
