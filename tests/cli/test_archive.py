"""The archive's verbs and the verbs that read across it, as processes against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from belayer.cli.archive import parse_age, parse_size
from belayer.errors import InputError
from belayer.journal.embedded import EmbeddedServer
from tests.cli.command import assert_one_line_error, belayer
from tests.cli.journal_server import serving
from tests.replay.journals import eventful


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with serving(eventful(), tmp_path / "journal") as running:
        yield running


def test_from_server_to_archive_and_away(server: EmbeddedServer, tmp_path: Path) -> None:
    place = {"BELAYER_ARCHIVE_URL": str(tmp_path / "archive"), "BELAYER_JOURNAL_URL": server.url}
    before = json.loads(belayer("audit", "--json", **place).stdout)
    assert before["findings"] == []
    done = belayer("archive", "run", "--json", **place)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"archived": ["t"], "left": {}}), done
    assert json.loads(belayer("archive", "run", "--json", **place).stdout) == {"archived": [], "left": {}}
    (row,) = json.loads(belayer("archive", "list", "--json", **place).stdout)
    assert row["streams"] == 2 and row["size_bytes"] > 0
    assert row["segment"] in belayer("archive", "list", **place).stdout

    after = json.loads(belayer("audit", "--json", **place).stdout)
    assert after["findings"] == [] and after["events"] == before["events"] + 4
    assert_one_line_error(belayer("audit", "--url", server.url), "archived in segment", row["segment"], "--archive")
    assert_one_line_error(belayer("timeline", "t", "--url", server.url), "BELAYER_ARCHIVE_URL")
    assert belayer("timeline", "t", **place).returncode == 0
    assert "trajectory-finished" in belayer("tail", "t", "--lines", "5", **place).stdout
    assert belayer("export", "--out", str(tmp_path / "file"), **place).returncode == 0
    exported = json.loads(belayer("audit", "--file", str(tmp_path / "file"), "--json").stdout)
    assert (exported["findings"], exported["events"]) == ([], after["events"])
    status = json.loads(belayer("status", "--json", **place).stdout)
    assert (status["trajectories"], status["archived"]) == ([], 1)
    assert "1 more trajectories are archived" in belayer("status", **place).stdout

    assert belayer("archive", "verify", **place).returncode == 0
    (segment,) = (tmp_path / "archive" / "default").iterdir()
    whole = segment.read_bytes()
    segment.write_bytes(whole[:5] + bytes([whole[5] ^ 1]) + whole[6:])
    damaged = belayer("archive", "verify", "--json", **place)
    assert damaged.returncode == 1 and len(json.loads(damaged.stdout)["problems"]) == 1
    segment.write_bytes(whole)

    planned = belayer("archive", "prune", "--larger-than", "1", "--dry-run", **place)
    assert "would remove 1 segments" in planned.stdout and segment.exists()
    pruned = json.loads(belayer("archive", "prune", "--larger-than", "1", "--json", **place).stdout)
    assert (len(pruned["removed"]), pruned["streams"], segment.exists()) == (1, 2, False)
    assert_one_line_error(belayer("tail", "t", **place), "not in the journal")


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    assert_one_line_error(belayer("archive", "list"), "no archive is named", "archive_url in belayer.toml")
    assert_one_line_error(belayer("archive", "run", "--archive", str(tmp_path)), "no journal is named")
    assert_one_line_error(belayer("archive", "prune", "--archive", str(tmp_path)), "--older-than AGE")
    (tmp_path / "belayer.toml").write_text(f'archive_url = "{tmp_path}/from-file"\n')
    assert json.loads(belayer("archive", "list", "--json", cwd=tmp_path).stdout) == []


def test_ages_and_sizes() -> None:
    assert (parse_age("30d"), parse_age("90m")) == (timedelta(days=30), timedelta(minutes=90))
    assert (parse_size("2TB"), parse_size("500G"), parse_size("17")) == (2 * 10**12, 500 * 10**9, 17)
    for text in ("", "d", "3", "3y", "-1d"):
        with pytest.raises(InputError, match="no age"):
            parse_age(text)
    for text in ("", "G", "1.5G", "-1"):
        with pytest.raises(InputError, match="no size"):
            parse_size(text)
