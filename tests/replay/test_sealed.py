"""Audit and timeline of a journal whose payloads are encrypted: with the keys, without, and with wrong ones."""

from __future__ import annotations

import base64
from io import StringIO
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from belayer.errors import WrongKeyError
from belayer.journal.events import TokensAppended
from belayer.journal.export import ExportWriter
from belayer.journal.sealing import Keyring
from replay import report
from replay.audit import audit
from replay.timeline.page import page
from replay.timeline.source import from_entries
from replay.timeline.terminal import show
from tests.cli.command import assert_one_line_error, belayer
from tests.replay.journals import Story, T, eventful

KEY = b"k" * 32
KEYRING = Keyring({"k1": KEY})
OTHER = Keyring({"k2": KEY})
WRONG = Keyring({"k1": b"w" * 32})


def sealed(story: Story, keyring: Keyring = KEYRING) -> Story:
    """The story as a writer with that keyring stores it."""
    story.streams[T] = [
        (at_ns, tuple(keyring.seal(T, event) for event in events)) for at_ns, events in story.streams[T]
    ]
    return story


def variable(key: bytes) -> dict[str, str]:
    return {"BELAYER_ENCRYPTION_KEYS": "env:KEYS", "KEYS": f"k1 {base64.b64encode(key).decode()}"}


def test_the_timeline_is_the_same_with_the_key() -> None:
    opened, plain = from_entries(sealed(eventful()).entries(), "t", KEYRING), from_entries(eventful().entries(), "t")
    assert opened == plain
    assert opened.actions[0].command == "make step-1"


@pytest.mark.parametrize("keyring", [None, OTHER])
def test_without_the_key_it_says_so(keyring: Keyring | None) -> None:
    story = from_entries(sealed(eventful()).entries(), "t", keyring)
    assert story.sealed_with == ["k1"]
    assert [action.exit_status for action in story.actions if action.end_ns] == [0] * 4
    console = Console(file=StringIO(), width=140, color_system=None)
    show(story, console)
    assert isinstance(console.file, StringIO)
    for shown in (console.file.getvalue(), page(story)):
        assert "(sealed)" in shown
        assert "with k1" in shown
        assert "BELAYER_ENCRYPTION_KEYS" in shown


def test_another_key_of_that_name_is_refused() -> None:
    with pytest.raises(WrongKeyError, match="k1"):
        from_entries(sealed(eventful()).entries(), "t", WRONG)


def test_the_audit_measures_what_it_can_open() -> None:
    """A chunk with a log-probability too few, which only shows in the payload."""
    story = eventful()
    at, (events_at_ns, events) = next(
        (at, written) for at, written in enumerate(story.streams[T]) if isinstance(written[1][0], TokensAppended)
    )
    chunk = events[0]
    assert isinstance(chunk, TokensAppended)
    story.streams[T][at] = (events_at_ns, (replace(chunk, logprobs=chunk.logprobs[4:]), *events[1:]))
    entries = sealed(story).entries()
    found = audit(entries, KEYRING)
    assert [(finding.stream, finding.check) for finding in found.findings] == [(str(T), "generation")]
    assert found.sealed == {}
    blind = audit(entries)
    assert blind.findings == []
    assert blind.sealed == {"k1": sum(KEYRING.seal(T, event) != event for event in eventful().flat(T))}
    console = Console(file=StringIO(), width=140)
    report.show(blind, "a file", console)
    assert isinstance(console.file, StringIO)
    assert f"{blind.sealed['k1']} payloads are sealed with key k1" in console.file.getvalue()


def test_a_payload_that_does_not_open_is_a_finding() -> None:
    found = audit(sealed(eventful()).entries(), WRONG)
    assert {finding.check for finding in found.findings} == {"sealed"}
    assert len(found.findings) == audit(sealed(eventful()).entries()).sealed["k1"]


def test_the_verbs_take_the_keys_from_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "sealed.journal"
    with ExportWriter(path) as writer:
        for stream, entry in sealed(eventful()).entries():
            writer.add(stream, entry)
    shown = belayer("timeline", "t", "--file", str(path), **variable(KEY))
    assert shown.returncode == 0
    assert "make step-1" in shown.stdout
    assert "(sealed)" not in shown.stdout
    assert "make step-1" not in belayer("timeline", "t", "--file", str(path)).stdout
    assert_one_line_error(belayer("timeline", "t", "--file", str(path), **variable(b"w" * 32)), "k1", "does not open")
    assert belayer("audit", "--file", str(path), **variable(KEY)).returncode == 0
    assert belayer("audit", "--file", str(path), **variable(b"w" * 32)).returncode == 1
