"""Rows at every width: nothing is cut, nothing is wider than the terminal's words allow, numbers stay whole."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from replay.rows import Rows

NAMES = ["django__django-11039", "t-2"]


def printed(width: int) -> str:
    rows = Rows("trajectory", "run", ">tokens again", "~why", title="Runs")
    rows.add(NAMES[0], "failures 12", "1234567", "the recovery itself died and another one finished it")
    rows.add(NAMES[1], "undisturbed", "0", "")
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(rows)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [20, 32, 40, 58, 60, 64, 72, 80, 100, 200])
def test_nothing_is_cut_at_any_width(width: int) -> None:
    text = printed(width)
    assert all(len(line) <= width for line in text.splitlines())
    for whole in (*NAMES, "failures 12", "1234567"):
        assert whole in text
    words = " ".join(text.split())
    for word in ("recovery", "itself", "finished"):
        assert word in words


def test_a_wide_terminal_has_a_table_and_a_narrow_one_a_record_for_each_row() -> None:
    wide, narrow = printed(120).splitlines(), printed(40).splitlines()
    assert wide[1].split() == ["trajectory", "run", "tokens", "again", "why"] and len(wide) == 4
    assert narrow[:4] == ["Runs", NAMES[0], "  run: failures 12", "  tokens again: 1234567"]
    assert narrow[-3:] == ["t-2", "  run: undisturbed", "  tokens again: 0"]


def test_headings_are_broken_before_the_table_is_given_up() -> None:
    lines = printed(62).splitlines()
    assert lines[1].split() == ["tokens"] and lines[2].split() == ["trajectory", "run", "again", "why"]
