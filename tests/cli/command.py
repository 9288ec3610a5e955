"""Runs the command as a process, the way a person does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "belayer.cli"]
_OURS = "BELAYER_"


def environment(**variables: str) -> dict[str, str]:
    """The tests' environment without any setting of ours but those given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return kept | {"PYTHONPATH": str(ROOT), "COLUMNS": "160", "NO_COLOR": "1"} | variables


def belayer(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `belayer` and return what came of it."""
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def assert_one_line_error(done: subprocess.CompletedProcess[str], *said: str) -> None:
    """Exit status 2, nothing on stdout, and one line on stderr that says so."""
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.startswith("belayer: ")
    assert done.stderr.count("\n") == 1
    for part in said:
        assert part in done.stderr
