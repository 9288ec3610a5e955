"""The timeline of an eventful story: what counts, what was superseded, how each failure was overcome; and its page."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from msgspec.structs import replace
from rich.console import Console

from belayer.errors import InputError, UnknownStreamError
from belayer.journal.columns import pack_token_ids
from belayer.journal.events import (
    CheckpointExtended,
    CheckpointPublished,
    CheckpointStarted,
    FailureDetected,
    HandoverCompleted,
    RecoveryStarted,
    TrajectoryResumed,
    TrajectoryStarted,
    WorkerReady,
    WorkerRegistered,
)
from belayer.journal.export import ExportWriter
from replay.audit import audit
from replay.timeline.model import Action, Incident, Note
from replay.timeline.model import Story as Told
from replay.timeline.page import page, write_page
from replay.timeline.source import from_entries, from_file
from replay.timeline.terminal import show
from replay.timeline.words import captured, figures, headline, lost, recovered, seconds, size
from tests.histories import Life, lives
from tests.replay.journals import (
    BOX,
    ENGINE,
    Story,
    T,
    committed,
    end,
    eventful,
    generate,
    restored,
    started,
    underway,
)
from tests.replay.journals import recovered as recovered_sandbox
from tests.replay.mistakes_elsewhere import LACKS, files_alone


def told(story: Story) -> Told:
    return from_entries(story.entries(), "t")


def printed(story: Told, width: int = 140) -> str:
    console = Console(file=StringIO(), width=width, color_system=None)
    show(story, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_live_branch_and_the_superseded_one() -> None:
    story = told(eventful())
    assert [(one.number, one.superseded_by is None) for one in story.actions] == [
        (1, True),
        (2, False),
        (3, False),
        (2, True),
        (3, True),
    ]
    assert [(one.number, one.tokens, one.superseded_by is None) for one in story.generations] == [
        (1, 12, True),
        (2, 12, False),
        (3, 12, False),
        (2, 8, True),
        (3, 12, True),
    ]
    assert story.actions[2].end_ns is None
    assert (story.ending, story.reward, story.findings) == ("finished", 1.0, 0)
    assert headline(story) == "finished after surviving 2 failures"


def test_each_failure_and_how_it_was_overcome() -> None:
    sandbox, engine = told(eventful()).incidents
    assert (sandbox.kind, sandbox.incarnation, sandbox.successor, sandbox.checkpoint) == (
        "sandbox",
        "box-1",
        "box-2",
        "t-b1",
    )
    assert sandbox.rewound_to is not None
    assert (sandbox.rewound_to.number, sandbox.actions_again, sandbox.tokens_again) == (1, 2, 24)
    assert (engine.kind, engine.successor, engine.hit, engine.rewound_to) == ("engine", "w-2", True, None)
    for incident in (sandbox, engine):
        times = [incident.detected_ns, incident.started_ns, incident.ready_ns, incident.resumed_ns]
        assert None not in times
        assert times == sorted(times, key=lambda time_ns: time_ns or 0)
        assert incident.attempts == 1


def test_checkpoints_and_who_needed_them() -> None:
    story = told(eventful())
    assert [(one.name, one.was_published, one.restored) for one in story.checkpoints] == [
        ("t-b1", True, 1),
        ("t-b2", False, 0),
        ("t-b2-again", True, 0),
    ]
    by_number = [(action.number, action.checkpoint and action.checkpoint.name) for action in story.actions]
    assert by_number == [(1, "t-b1"), (2, None), (3, None), (2, "t-b2-again"), (3, None)]


def test_what_a_checkpoint_stored_and_left_out_is_told() -> None:
    story = underway()
    story.take_over(BOX, "checkpointer")
    at = "t-b3", "box-2", 3, story.sequence(T)
    story.write(BOX, CheckpointStarted(*at), CheckpointPublished(*at, 3_000_000, 0.02, 0.2, 12_000, ("/data", "/vol")))
    known = told(story)
    assert captured(known.checkpoints[-1]) == (
        "checkpoint 3.0 MB (12 KB new), frozen 20 ms of 0.20 s, without /data, /vol"
    )
    assert ("stored", "12 KB", "of 3.0 MB captured") in figures(known)
    assert "/data, /vol" in printed(known)
    assert "without /data, /vol" in page(known)


def test_a_restore_of_files_alone_says_what_it_did_not_bring_back() -> None:
    story = underway()
    checkpoint, *at = files_alone(story)
    story.write(BOX, replace(restored(checkpoint, *at, "box-3"), left_out=LACKS))
    story.write(T, TrajectoryResumed(*at, "box-3", LACKS))
    assert audit(story.entries()).findings == []
    known = told(story)
    assert captured(known.checkpoints[-1]).startswith("files alone, not postgres (pid 17): 4 KB (0 KB new)")
    assert ("files alone", "1", "checkpoints, of which a process could not be captured") in figures(known)
    assert recovered(known.incidents[-1]) == (
        "restored from a checkpoint; without postgres (pid 17), which it does not hold; nothing superseded"
    )
    assert "without postgres (pid 17)" in printed(known)


def test_a_boundary_at_which_nothing_had_changed() -> None:
    """The checkpoint before holds it; restored there, the later boundary was needed and not the earlier one."""
    story = underway()
    newest = story.sequence(T)
    story.take_over(BOX, "checkpointer")
    story.write(BOX, CheckpointStarted("t-b3", "box-2", 3, newest))
    story.write(BOX, CheckpointExtended("t-b2-again", "t-b3", "box-2", 3, newest, 0.001, 0.01))
    recovered_sandbox(story, "box-2", "t-b2-again", 3, newest, "box-3")
    assert audit(story.entries()).findings == []
    known = told(story)
    last = known.checkpoints[-1]
    assert (last.name, last.held_by, last.was_published, last.restored) == ("t-b3", "t-b2-again", False, 1)
    assert [one.restored for one in known.checkpoints] == [1, 0, 0, 1]
    assert known.actions[-1].checkpoint is last
    assert dict((name, remark) for name, _, remark in figures(known))["checkpoints"].endswith("1 more not needed")


def test_an_engine_that_dies_unused_is_told_but_not_counted() -> None:
    story = underway()
    story.take_over(ENGINE, "detector")
    story.write(ENGINE, FailureDetected("w-2", "died", "between two generations", "detector"))
    third = WorkerRegistered("w-3", "shadow", "host", 13, 130, "http://h:3", "r")
    story.write(ENGINE, third, WorkerReady("w-3", 1))
    story.write(ENGINE, RecoveryStarted("w-2", "", "recovery"))
    phases_s = {"fence": 0.004, "prove": 0.09, "adopt": 0.006}
    story.write(ENGINE, HandoverCompleted("w-2", "w-3", 0.1, phases_s, 300), WorkerReady("w-3", 1))
    end(story)
    assert "w-3 took over (fence 4 ms, prove 90 ms, adopt 6 ms); the KV cache of 300 tokens adopted" in recovered(
        told(story).incidents[-1]
    )
    assert [one.hit for one in told(story).incidents] == [True, True, False]
    assert headline(told(story)) == "finished after surviving 2 failures"


def test_a_recovery_that_died_is_told() -> None:
    story = underway()
    story.take_over(BOX, "detector")
    story.write(BOX, FailureDetected("box-2", "died", "", "detector"))
    for recovery in ("one", "two"):
        story.take_over(BOX, recovery)
        story.write(BOX, RecoveryStarted("box-2", "", recovery))
    incident = told(story).incidents[-1]
    assert (incident.attempts, incident.resumed_ns) == (2, None)
    assert "the recovery itself died" in page(told(story))
    assert "not resumed" in page(told(story))


def test_the_terminal_shows_every_turn_once() -> None:
    text = printed(told(eventful()))
    assert text.count("make step-1") == 1
    assert text.count("make step-2") == text.count("make step-3") == 2
    assert len(re.findall(r"╎ +2 make step-2", text)) == 1
    assert len(re.findall(r"│ +2 make step-2", text)) == 1
    assert "rewound to boundary 1, 2 actions and 24 tokens superseded" in text
    assert all(len(line) <= 140 for line in text.splitlines())


def test_what_the_failures_took_is_one_sentence() -> None:
    story = told(eventful())
    sentence = lost(story)
    assert sentence.startswith("Nothing but time was lost: ") and sentence.endswith("superseded and generated again.")
    assert sentence in " ".join(printed(story).split())
    assert sentence in page(story) and "Equal to the other run." in page(story, "Equal to the other run.")
    story.findings = 1
    assert lost(story) == ""
    unhurt = Told("t", ending="finished", items=[Incident(1, "engine", "e-1", "died", "", 1, "d", resumed_ns=2)])
    assert lost(unhurt) == "Nothing was lost: every action and every token stands, once."
    assert lost(Told("t", ending="finished")) == ""
    assert lost(dataclasses.replace(unhurt, ending="going on")) == ""


def test_times_and_sizes_are_read_at_a_glance() -> None:
    assert [seconds(value) for value in (0.003, 0.42, 12.3, 460.0, 18_720.0)] == [
        "3 ms", "0.42 s", "12.3 s", "7 min 40 s", "5 h 12 min",
    ]  # fmt: skip
    assert [size(value) for value in (812_000, 3_100_000, 5_200_000_000)] == ["812 KB", "3.1 MB", "5.2 GB"]
    ticks = re.findall('class="tick"[^>]*>([^<]*)<', page(Told("t", end_ns=150 * 10**9)))
    assert ticks[:6] == ["0 s", "15 s", "30 s", "45 s", "1:00", "1:15"]


def test_a_long_command_is_cut_on_the_page_and_the_page_says_so() -> None:
    action = Action(1, 1, "echo " + "x" * 10_000, "box-1", 1, 2)
    document = page(Told("t", items=[action], end_ns=2))
    assert "and 6,005 more characters" in document and document.count("x" * 100) < 60


def test_a_narrow_terminal_keeps_to_its_width() -> None:
    assert all(len(line) <= 70 for line in printed(told(eventful()), width=70).splitlines())


class _Reader(HTMLParser):
    """Checks that tags are closed in order, and collects the text and whatever would be loaded from elsewhere."""

    VOID = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.loads += [name for name, _ in attrs if name in ("src", "href", "srcset", "xlink:href")]
        if tag in ("script", "link", "iframe", "img"):
            self.loads.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(document: str) -> _Reader:
    reader = _Reader()
    reader.feed(document)
    reader.close()
    assert reader.open == []
    assert reader.loads == []
    assert "@import" not in document
    assert set(re.findall(r"url\(([^)]*)\)", document)) <= {"#hatch", "#head"}
    return reader


def test_the_page_stands_alone_and_is_well_formed() -> None:
    text = " ".join(read(page(told(eventful()))).text)
    assert "Finished after surviving 2 failures" in text
    assert "restored from a checkpoint; rewound to boundary 1" in text


def test_what_the_journal_says_is_text_on_the_page() -> None:
    story = underway()
    generate(story, 4, "w-2")
    evil = "<script>alert('&')</script>"
    story.write(T, started(4, "box-2", evil))
    story.write(T, committed(4))
    story.take_over(BOX, "detector")
    story.write(BOX, FailureDetected("box-2", "died", evil, evil))
    reader = read(page(told(story)))
    assert evil in "".join(reader.text)


def test_a_trajectory_that_has_only_begun() -> None:
    story = Story()
    story.take_over(T, "rollout")
    story.write(T, TrajectoryStarted("r", "task", pack_token_ids([1])))
    only = told(story)
    assert [type(item) for item in only.items] == [Note]
    assert headline(only) == "is going on, undisturbed"
    assert "going on" in printed(only)
    read(page(only))


@given(lives())
def test_any_life_can_be_told(life: Life) -> None:
    story = Story()
    for event in life.rollout:
        story.write(T, event)
    for event in life.box:
        story.write(BOX, event)
    one = told(story)
    read(page(one))
    assert len(one.actions) == sum(type(event).__name__ == "ActionStarted" for event in life.rollout)
    live = [action for action in one.actions if action.superseded_by is None and action.end_ns is not None]
    assert [(action.number, action.boundary_sequence) for action in live] == [
        tuple(boundary) for boundary in life.prefix.boundaries[1:]
    ]


def export(story: Story, path: Path) -> Path:
    with ExportWriter(path) as writer:
        for stream, entry in story.entries():
            writer.add(stream, entry)
    return path


def test_from_a_file(tmp_path: Path) -> None:
    path = export(eventful(), tmp_path / "a.journal")
    assert from_file(path, "t") == told(eventful())
    with pytest.raises(UnknownStreamError, match="has t"):
        from_file(path, "nosuch")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="choose another place"):
        write_page(told(eventful()), tmp_path / "nosuch" / "t.html")
    assert list(tmp_path.iterdir()) == []
