"""audit, status, tail, export and timeline against a real server, as processes and with real exported files."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from belayer import ids
from belayer.journal.codec import GENESIS, Entry, encode_entry
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.events import EpochStarted, FailureDetected, WorkerRemoved
from belayer.journal.export import ExportWriter, read_export
from tests.cli.command import COMMAND, ROOT, assert_one_line_error, belayer, environment
from tests.cli.journal_server import serving
from tests.replay.journals import ENGINE, Story, T, chunk, end, eventful, underway
from tests.waiting import DEADLINE_S


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with serving(eventful(), tmp_path_factory.mktemp("journal")) as running:
        yield running


@pytest.fixture(scope="module")
def url(server: EmbeddedServer) -> str:
    return server.url


def exported(story: Story, path: Path) -> Path:
    with ExportWriter(path) as writer:
        for stream, entry in story.entries():
            writer.add(stream, entry)
    return path


def damaged() -> Story:
    story = underway()
    story.write(T, chunk(9, 0, 4))
    end(story)
    return story


def last_json(text: str) -> dict[str, Any]:
    return json.loads(text.splitlines()[-1])


# --- audit -------------------------------------------------------------------------------------------------------


def test_audit_of_a_clean_server(url: str) -> None:
    done = belayer("audit", "--url", url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no findings" in done.stdout


def test_audit_as_json_says_what_it_saw(url: str) -> None:
    done = belayer("audit", "--json", BELAYER_JOURNAL_URL=url)
    report = last_json(done.stdout)
    assert done.returncode == 0
    assert report["findings"] == []
    assert report["streams"] == {"run": 1, "sandbox": 1, "trajectory": 1, "worker": 1}
    assert report["events"] == sum(len(eventful().flat(stream)) for stream in eventful().streams)


@pytest.mark.parametrize("program", [COMMAND, [COMMAND[0], "-m", "replay"]], ids=["belayer", "replay"])
def test_findings_are_exit_status_1(program: list[str], tmp_path: Path) -> None:
    path = exported(damaged(), tmp_path / "damaged.journal")
    arguments = ["--file", str(path)] if program is COMMAND else [str(path)]
    table, plain = (
        subprocess.run(
            [*program, "audit", *arguments, *more], env=environment(), cwd=ROOT, capture_output=True, text=True
        )
        for more in ([], ["--json"])
    )
    assert (table.returncode, plain.returncode) == (1, 1)
    assert "generation" in table.stdout
    (finding,) = last_json(plain.stdout)["findings"]
    assert (finding["stream"], finding["check"]) == (str(T), "generation")


def test_a_cut_file_is_exit_status_2(tmp_path: Path) -> None:
    path = exported(eventful(), tmp_path / "whole.journal")
    whole = path.read_bytes()
    for length in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert_one_line_error(belayer("audit", "--file", str(path)), str(path))


def test_an_event_of_a_newer_version_is_exit_status_2(tmp_path: Path) -> None:
    entry, _ = encode_entry(1, 0, GENESIS, [EpochStarted(1, "w", "7.1.0")], [b"i" * 16], 1)
    newer = msgspec.msgpack.encode([[b"i" * 16, GENESIS, 2, ["from-the-future", 1]]])
    path = tmp_path / "newer.journal"
    with ExportWriter(path) as writer:
        writer.add(T, entry)
        writer.add(T, Entry(1, 2, 1, newer))
    done = belayer("audit", "--file", str(path))
    assert_one_line_error(done, "from-the-future", "Belayer 7.1.0 wrote it", "sequence 2")


# --- status and tail ---------------------------------------------------------------------------------------------


def test_status_of_a_finished_run(url: str) -> None:
    table = belayer("status", "--url", url)
    assert table.returncode == 0
    assert "finished" in table.stdout
    snapshot = last_json(belayer("status", "--url", url, "--json").stdout)
    (trajectory,) = snapshot["trajectories"]
    assert (trajectory["trajectory"], trajectory["state"], trajectory["boundary"]) == ("t", "finished", 3)
    assert (trajectory["rewinds"], trajectory["sandbox_state"], trajectory["sandbox_failures"]) == (1, "removed", 1)
    assert [run["state"] for run in snapshot["runs"]] == ["finished"]


def test_status_of_a_run_that_goes_on(tmp_path: Path) -> None:
    with serving(underway(), tmp_path / "journal") as running:
        snapshot = last_json(belayer("status", "--url", running.url, "--json").stdout)
    (trajectory,) = snapshot["trajectories"]
    assert (trajectory["state"], trajectory["writer"], trajectory["epoch"]) == ("open", "rollout", 3)
    assert (trajectory["checkpoint"], trajectory["checkpoint_boundary"]) == ("t-b2-again", 2)
    assert [(one["incarnation"], one["role"], one["state"]) for one in snapshot["engines"]] == [
        ("w-2", "main", "ready"),
        ("w-1", "former", "failed"),
    ]


def test_status_of_an_excluded_worker(tmp_path: Path) -> None:
    story = underway()
    story.take_over(ENGINE, "recovery")
    story.write(ENGINE, FailureDetected("w-2", "gpu", "a second main died within 4 s", "recovery"))
    story.write(ENGINE, WorkerRemoved("w-1", "excluded"), WorkerRemoved("w-2", "excluded"))
    with serving(story, tmp_path / "journal") as running:
        snapshot = last_json(belayer("status", "--url", running.url, "--json").stdout)
    assert [(one["incarnation"], one["state"]) for one in snapshot["engines"]] == [("w-2", "excluded")]


def test_status_of_an_empty_journal(url: str) -> None:
    done = belayer("status", "--url", url, "--namespace", "empty")
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["The journal is empty.", "No acknowledged event was found to be lost."]


def test_status_is_watched_until_interrupted(url: str) -> None:
    arguments = ["status", "--url", url, "--watch", "--json", "--every", "0.1"]
    with started(arguments) as process:
        assert process.stdout is not None and process.stderr is not None
        first, second = json.loads(process.stdout.readline()), json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130
        assert process.stderr.read() == ""
    assert first["trajectories"][0]["age_s"] <= second["trajectories"][0]["age_s"]


def test_tail_shows_the_last_events(url: str) -> None:
    done = belayer("tail", "t", "--url", url, "-n", "2")
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert len(lines) == 2
    assert "action-committed action=3" in lines[0]
    assert "trajectory-finished reason=submitted reward=1.000" in lines[1]


def test_tail_finds_other_streams_by_name(url: str) -> None:
    assert belayer("tail", "w", "--url", url).stdout == belayer("tail", str(ENGINE), "--url", url).stdout != ""


def test_tail_as_json_has_the_tokens(url: str) -> None:
    lines = belayer("tail", "t", "--url", url, "-n", "100000", "--json").stdout.splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["sequence"] for event in events] == list(range(1, len(eventful().flat(T)) + 1))
    chunks = [event for event in events if event["tag"] == "tokens-appended"]
    assert chunks[1]["token_ids"] == [4, 5, 6, 7]
    assert chunks[1]["logprobs"] == [-0.5] * 4


def test_tail_follows_until_interrupted(url: str) -> None:
    with started(["tail", "t", "--url", url, "--follow", "-n", "1"]) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "trajectory-finished" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130
        assert process.stderr.read() == ""


def started(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


@pytest.mark.parametrize("verb", [["tail", "nosuch"], ["timeline", "nosuch"], ["export", "--out", "x", "nosuch"]])
def test_an_unknown_trajectory_is_one_line(verb: list[str], url: str, tmp_path: Path) -> None:
    assert_one_line_error(belayer(*verb, cwd=tmp_path, BELAYER_JOURNAL_URL=url), "nosuch", "belayer status")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", [["tail", "worker/w1"], ["timeline", "tt"], ["export", "--out", "x", "sandbox/tt"]])
def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(verb: list[str], url: str, tmp_path: Path) -> None:
    meant = "w" if verb[1] == "worker/w1" else "t"
    done = belayer(*verb, cwd=tmp_path, BELAYER_JOURNAL_URL=url)
    assert_one_line_error(done, f"did you mean {meant}? `belayer status`")


def test_a_name_that_cannot_be_one_is_one_line(url: str) -> None:
    assert_one_line_error(belayer("tail", "a b", "--url", url), "not a usable name")
    assert_one_line_error(belayer("tail", "planet/x", "--url", url), "not a stream")


# --- export ------------------------------------------------------------------------------------------------------


def test_an_export_is_the_journal(url: str, tmp_path: Path) -> None:
    out = tmp_path / "all.journal"
    done = belayer("export", "--out", str(out), "--url", url)
    assert done.returncode == 0
    assert list(read_export(out)) == eventful().entries()
    assert [path.name for path in tmp_path.iterdir()] == ["all.journal"]


def test_an_export_of_one_trajectory_has_its_sandbox(url: str, tmp_path: Path) -> None:
    out = tmp_path / "t.journal"
    assert belayer("export", "-o", str(out), "t", "--url", url).returncode == 0
    assert {stream for stream, _ in read_export(out)} == {T, ids.sandbox("t")}


def test_a_file_that_is_there_is_kept_unless_forced(url: str, tmp_path: Path) -> None:
    out = tmp_path / "kept.journal"
    out.write_text("mine")
    assert_one_line_error(belayer("export", "-o", str(out), "--url", url), "--force")
    assert out.read_text() == "mine"
    assert belayer("export", "-o", str(out), "--url", url, "--force").returncode == 0
    assert list(read_export(out)) == eventful().entries()


def test_a_full_disk_leaves_nothing(url: str, tmp_path: Path) -> None:
    """The kernel refuses to let the file grow beyond 2,000 bytes."""
    limited = ["prlimit", "--fsize=2000", *COMMAND, "export", "-o", str(tmp_path / "x.journal"), "--url", url]
    done = subprocess.run(limited, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert_one_line_error(done, "cannot write", "File too large")
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    """The server takes the connection and never answers; Ctrl-C then ends the export."""
    (folder := tmp_path / "out").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "silent.sock"))
        listener.listen()
        listener.settimeout(30)
        url = f"unix://{tmp_path / 'silent.sock'}"
        with started(["export", "-o", str(folder / "x.journal"), "--url", url]) as process:
            assert process.stderr is not None
            listener.accept()
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 130
            assert process.stderr.read() == ""
    assert list(folder.iterdir()) == []


# --- timeline ----------------------------------------------------------------------------------------------------


def test_the_timeline_is_the_same_from_server_and_file(url: str, tmp_path: Path) -> None:
    path = exported(eventful(), tmp_path / "a.journal")
    live, file, replay = (
        belayer("timeline", "t", "--url", url),
        belayer("timeline", "trajectory/t", "--file", str(path)),
        subprocess.run(
            [COMMAND[0], "-m", "replay", "timeline", str(path), "t"],
            env=environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
        ),
    )
    assert live.returncode == file.returncode == replay.returncode == 0
    assert live.stdout == file.stdout == replay.stdout
    assert "finished after surviving 2 failures" in live.stdout


def test_export_and_timeline_as_json(url: str, tmp_path: Path) -> None:
    out = tmp_path / "a.journal"
    done = json.loads(belayer("export", "--out", str(out), "--url", url, "--json").stdout)
    assert (done["file"], done["size_bytes"]) == (str(out), out.stat().st_size)
    assert done["entries"] == len(eventful().entries())
    story = json.loads(belayer("timeline", "t", "--file", str(out), "--json").stdout)
    assert len(story["items"]["incidents"]) == 2


def test_the_timeline_as_a_page(url: str, tmp_path: Path) -> None:
    out = tmp_path / "t.html"
    done = belayer("timeline", "t", "--url", url, "--html", str(out))
    assert (done.returncode, done.stdout) == (0, f"{out}\n")
    assert "<!doctype html>" in out.read_text()
    assert_one_line_error(
        belayer("timeline", "t", "--url", url, "--html", str(tmp_path / "no" / "t.html")), "cannot write"
    )


def test_a_file_without_that_trajectory_says_what_it_has(tmp_path: Path) -> None:
    path = exported(eventful(), tmp_path / "a.journal")
    assert_one_line_error(belayer("timeline", "nosuch", "--file", str(path)), "nosuch", f"{path} has t")
