"""What the demo says at its end, in a terminal of 80 columns: everything whole, the verdict and the pages last."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console

from belayer.demo.board import show
from belayer.demo.compare import Difference
from belayer.demo.failures import Kind
from belayer.demo.measures import Cost, Recovery
from belayer.demo.report import DemoReport, RunReport

NAME = "pydicom__pydicom-1256"


def printed(*, differs: bool) -> str:
    recovery = Recovery(Kind.CHECKPOINT, "", 0.1, 13.2, 16.8)
    differences = [Difference("file /a", "x", "y")] if differs else []
    report = DemoReport(
        seed=7,
        runs=[
            RunReport(NAME, "undisturbed", 116.5, 49),
            RunReport(NAME, "failures 1", 254.9, 49, [recovery], cost=Cost(13404, 12), differences=differences),
        ],
        findings=(),
        events=7542,
        wall_s=381.0,
        trajectories=[NAME],
        export=Path("/out/journal.belayer"),
        timelines=[Path("/out/one.html"), Path("/out/two.html")],
    )
    console = Console(file=StringIO(), width=80, color_system=None)
    show(report, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_names_and_figures_are_whole_at_80_columns() -> None:
    text = printed(differs=False)
    assert text.count(NAME) == 2 and "…" not in text
    for whole in ("undisturbed", "failures 1", "13404", "255 s", "container-checkpoint", "16.80 s", "reference"):
        assert whole in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_the_verdict_and_what_to_open_stay_in_sight() -> None:
    tail = printed(differs=False).splitlines()[-10:]
    assert any(line.startswith("all equal: 1 failure (0 missed) in 2 runs") for line in tail)
    assert [line.strip() for line in tail if line.startswith("  /")] == [
        "/out/one.html", "/out/two.html", "/out/journal.belayer",
    ]  # fmt: skip


def test_a_difference_is_named_before_the_verdict() -> None:
    text = printed(differs=True)
    assert text.index("file /a: expected x, found y") < text.index("not all is well")
