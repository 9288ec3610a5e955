"""One stream that cannot be read, of a newer Belayer or damaged: each verb says so, and goes on with the others."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from belayer import ids
from belayer.journal.codec import GENESIS, Entry, encode_entry
from belayer.journal.connect import open_store
from belayer.journal.events import EpochStarted
from belayer.journal.writer import StreamWriter
from tests.archives import end_trajectory, write_trajectory
from tests.cli.command import assert_one_line_error, belayer
from tests.journal.faults import command

NEWER = ids.trajectory("newer")
DAMAGED = ids.trajectory("damaged")
EVENT_ID = b"i" * 16


@pytest.fixture
async def journal(redis_url: str, namespace: str) -> AsyncIterator[tuple[str, ...]]:
    """A trajectory that has ended, one of a newer Belayer, and one whose second event is none; options
    that name the journal."""
    store = await open_store(redis_url, namespace=namespace)
    await end_trajectory(store, "good", await write_trajectory(store, "good"))
    for stream, event in ((NEWER, ["teleported", 1]), (DAMAGED, 7)):
        started, digest = encode_entry(1, 0, GENESIS, [EpochStarted(1, "w", "7.1.0")], [EVENT_ID], 1)
        assert await store.take_over(stream, None, started) is None
        await store.append(stream, Entry(1, 2, 1, msgspec.msgpack.encode([[EVENT_ID, digest, 1, event]])))
    yield "--url", redis_url, "--namespace", namespace
    await store.close()


def test_status_shows_the_others(journal: tuple[str, ...]) -> None:
    done = belayer("status", *journal, "--json")
    assert done.returncode == 0, done.stderr
    snapshot = json.loads(done.stdout)
    assert "good" in [one["trajectory"] for one in snapshot["trajectories"]]
    problems = {one["stream"]: one["problem"] for one in snapshot["unreadable"]}
    assert problems.keys() == {str(NEWER), str(DAMAGED)}
    assert "Belayer 7.1.0 wrote it" in problems[str(NEWER)]
    assert "trajectory/newer" in belayer("status", *journal).stdout


def test_a_server_that_is_away_is_one_line_in_status(tmp_path: Path) -> None:
    assert_one_line_error(belayer("status", "--url", f"unix://{tmp_path}/none.sock"), "none.sock")


@pytest.mark.parametrize("verb", ["tail", "timeline"])
def test_the_version_that_wrote_it_is_named(journal: tuple[str, ...], verb: str) -> None:
    options = ("--lines", "1") if verb == "tail" else ()
    assert_one_line_error(belayer(verb, "newer", *journal, *options), "teleported", "Belayer 7.1.0 wrote it")


def test_the_archive_takes_the_others_and_is_verified(journal: tuple[str, ...], tmp_path: Path) -> None:
    done = belayer("archive", "run", *journal, "--archive", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["archived"] == ["good"] and said["left"].keys() == {"newer", "damaged"}
    verified = belayer("archive", "verify", *journal, "--archive", str(tmp_path), "--json")
    assert verified.returncode == 0, verified.stdout + verified.stderr


async def test_a_damaged_beginning_is_a_problem_that_verify_names(
    journal: tuple[str, ...], namespace: str, tmp_path: Path
) -> None:
    store = await open_store(journal[1], namespace=namespace)
    lost = StreamWriter(store, ids.trajectory("lost"), 1, 0, GENESIS)
    await store.append(lost.stream, Entry(1, 1, 1, msgspec.msgpack.encode([7])))
    await store.close()
    verified = belayer("archive", "verify", *journal, "--archive", str(tmp_path), "--json")
    assert verified.returncode == 1, verified.stdout + verified.stderr
    assert any("trajectory/lost" in problem for problem in json.loads(verified.stdout)["problems"])


async def test_an_entry_that_is_none_is_a_finding_and_the_audit_goes_on(redis_url: str, namespace: str) -> None:
    """Not even its number of events can be read; the audit ended there, and said nothing of the other streams."""
    store = await open_store(redis_url, namespace=namespace)
    for name in ("a", "z"):
        await write_trajectory(store, name)
    await store.close()
    key = f"{{belayer:{namespace}:0}}:s:trajectory/a"
    await command(redis_url, "XADD", key, "1-99", "e", b"\xc0")
    done = belayer("audit", "--url", redis_url, "--namespace", namespace, "--json")
    said = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    assert [(one["stream"], one["check"]) for one in said["findings"]] == [("trajectory/a", "encoding")]
    assert said["streams"] == {"sandbox": 2, "trajectory": 2}
    assert said["entries"] > 12
