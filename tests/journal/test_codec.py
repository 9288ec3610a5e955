"""Stored bytes are a promise: the golden bytes of an event tag never change, and nothing that is not ours is read."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer import __version__, ids
from belayer.errors import CodecError, FencedError, UnknownEventError
from belayer.journal import codec, events
from belayer.journal.codec import (
    GENESIS,
    KNOWN_TAGS,
    Entry,
    count_of,
    decode_entry,
    encode_entry,
    encode_event,
    previous_digest_of,
)
from belayer.journal.events import AnyEvent, tag_of
from belayer.journal.memory_store import MemoryStore
from belayer.journal.writer import Reader, take_over
from replay.audit import audit

GOLDEN = Path(__file__).with_name("golden.json")
T = ids.trajectory("t")
EVENT_ID = bytes(range(16))
FIRST_SPEC = events.SandboxSpec("image", "/testbed", {"A": "b"}, ("true",), 1 << 30, 1.5)
SECOND_SPEC = msgspec.structs.replace(
    FIRST_SPEC, network="bridge", user="1000", binds=("/data:/data:ro",), read_only=True, tmpfs=("/tmp",)
)
SPEC = msgspec.structs.replace(SECOND_SPEC, cap_drop=("ALL",), cap_add=("CHOWN",))
LEFT_OUT = (events.LeftOut(17, "postgres", "io_uring"), events.LeftOut(0, "/dev/shm/x", ""))

EXAMPLES: list[AnyEvent] = [
    events.EpochStarted(3, "rollout", "0.2.0"),
    events.FailureDetected("i-1", "died", "exit status 137", "detector"),
    events.RecoveryStarted("i-1", "restore c-1", "recovery"),
    events.StreamArchived(41, "20261130T100000-00c0ffee.segment"),
    events.TrajectoryStarted("run", "task", b"\x01\x00\x00\x00", {"k": "v"}),
    events.GenerationStarted(1, "w", "w-1"),
    events.GenerationResumed(1, 7, "w", "w-2"),
    events.TokensAppended(1, 0, 2, bytes(8), bytes(8), b"\x01\x00", 5),
    events.GenerationFinished(1, 2, "stop"),
    events.ActionStarted(1, "ls", 60.0, "i-1"),
    events.ActionCommitted(1, 0, b"\x05\x00\x00\x00", bytes(16), 0.25, True, 3),
    events.Rewound(1, 9, "sandbox died"),
    events.TrajectoryResumed(1, 9, "i-2", LEFT_OUT),
    events.TrajectoryFinished("done", 1.0),
    events.TrajectoryAborted("given up"),
    events.Sealed("k1", bytes(12), b"ciphertext and tag", events.TokensAppended(1, 0, 2, b"", b"", b"", 5)),
    events.SandboxCreated("i-1", "c0ffee", "sha256:0", "host", 17, 12345, "run", SPEC),
    events.CheckpointStarted("c-1", "i-1", 1, 9),
    events.CheckpointPublished("c-1", "i-1", 1, 9, 4096, 0.01, 0.5, 512, ("/data", "/vol"), LEFT_OUT),
    events.CheckpointExtended("c-1", "c-2", "i-1", 2, 14, 0.001, 0.01),
    events.CheckpointDiscarded("c-1", "not idle"),
    events.SandboxRestored("c-1", 1, 9, "i-2", "c0ffee", "sha256:0", "host", 18, 12346, 0.3, LEFT_OUT),
    events.SandboxRemoved("i-1", "finished"),
    events.WorkerRegistered("w-1", "main", "host", 19, 12347, "http://127.0.0.1:1", "run"),
    events.WorkerReady("w-1", 5),
    events.HandoverCompleted("w-1", "w-2", 0.2, {"fence": 0.05, "adopt": 0.01}, 4096),
    events.WorkerDraining("w-1", "its memory server is gone"),
    events.WorkerRemoved("w-1", "finished"),
    events.RunStarted("host", 1, 12, "everysec", "0.1.0"),
    events.RunFinished("done"),
    events.WeightsPublished(6),
    events.TrainerCheckpointed(4, 6, "/checkpoints/4"),
]


def encoded(event: AnyEvent) -> bytes:
    return encode_entry(2, 6, GENESIS, [event], [EVENT_ID], 1_700_000_000_000_000_000)[0].body


def test_every_tag_has_an_example_and_golden_bytes() -> None:
    tags = KNOWN_TAGS - {"tokens-packed"}  # tests/journal/test_packing.py has its bytes
    assert {tag_of(event) for event in EXAMPLES} == tags
    assert set(json.loads(GOLDEN.read_text())) == tags


@pytest.mark.parametrize("event", EXAMPLES, ids=tag_of)
def test_golden_bytes_are_written_and_read(event: AnyEvent) -> None:
    """The last golden bytes of a tag are what is written now; those before it were written by earlier versions."""
    golden = bytes.fromhex(json.loads(GOLDEN.read_text())[tag_of(event)][-1])
    assert encoded(event) == golden
    (recorded,) = decode_entry(T, 2, 7, golden)
    assert recorded.event == event
    assert (recorded.sequence, recorded.epoch, recorded.event_id) == (7, 2, EVENT_ID)


EARLIER: dict[str, list[AnyEvent]] = {
    "epoch-started": [events.EpochStarted(3, "rollout", "")],
    "sandbox-created": [
        events.SandboxCreated("i-1", "c0ffee", "sha256:0", "host", 17, 12345, "run", FIRST_SPEC),
        events.SandboxCreated("i-1", "c0ffee", "sha256:0", "host", 17, 12345, "run", SECOND_SPEC),
    ],
    "checkpoint-published": [
        events.CheckpointPublished("c-1", "i-1", 1, 9, 4096, 0.01, 0.5, 0, ()),
        events.CheckpointPublished("c-1", "i-1", 1, 9, 4096, 0.01, 0.5, 512, ("/data", "/vol")),
    ],
    "sandbox-restored": [events.SandboxRestored("c-1", 1, 9, "i-2", "c0ffee", "sha256:0", "host", 18, 12346, 0.3)],
    "trajectory-resumed": [events.TrajectoryResumed(1, 9, "i-2")],
}
"""How the golden bytes of earlier versions are read today, for each tag, oldest first. Only ever added to."""


def test_the_bytes_of_every_earlier_version_are_still_read() -> None:
    golden = {tag: versions[:-1] for tag, versions in json.loads(GOLDEN.read_text()).items()}
    assert {tag: len(versions) for tag, versions in golden.items() if versions} == {
        tag: len(versions) for tag, versions in EARLIER.items()
    }
    for tag, versions in EARLIER.items():
        for event, stored in zip(versions, golden[tag], strict=True):
            assert decode_entry(T, 2, 7, bytes.fromhex(stored))[0].event == event


@given(st.lists(st.sampled_from(EXAMPLES), min_size=1, max_size=40), st.integers(0, 1 << 40))
def test_any_group_reads_back_as_a_chain(group: list[AnyEvent], after: int) -> None:
    event_ids = [ids.new_event_id() for _ in group]
    entry, digest = encode_entry(4, after, b"p" * 16, group, event_ids, 7)
    assert (entry.count, entry.expected_sequence, entry.digest) == (len(group), after, digest)
    assert count_of("here", entry.body) == len(group)
    assert previous_digest_of(entry.body) == b"p" * 16
    recorded = decode_entry(T, 4, entry.last_sequence, entry.body)
    assert [r.event for r in recorded] == group
    assert [r.event_id for r in recorded] == event_ids
    assert [r.previous_digest for r in recorded] == [b"p" * 16, *[r.digest for r in recorded[:-1]]]
    assert recorded[-1].digest == digest
    assert [r.sequence for r in recorded] == list(range(after + 1, after + len(group) + 1))


@pytest.mark.parametrize("event", EXAMPLES, ids=tag_of)
def test_one_event_is_encoded_as_a_group_of_one(event: AnyEvent) -> None:
    alone = encode_event(2, 6, b"p" * 16, event, EVENT_ID, 9)
    group, digest = encode_entry(2, 6, b"p" * 16, [event], [EVENT_ID], 9)
    assert msgspec.structs.asdict(alone) == msgspec.structs.asdict(group)
    assert (alone.digest, alone.previous_digest) == (digest, previous_digest_of(alone.body))


def test_a_very_large_group_has_the_longest_header() -> None:
    group = [events.RunFinished("x")] * 70_000
    entry, _ = encode_entry(1, 0, GENESIS, group, [EVENT_ID] * 70_000, 0)
    assert count_of("here", entry.body) == 70_000
    assert len(decode_entry(T, 1, 70_000, entry.body)) == 70_000
    assert previous_digest_of(entry.body) == GENESIS


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_changed_byte_changes_the_digest_or_is_refused(event: AnyEvent, data: st.DataObject) -> None:
    body = encoded(event)
    at = data.draw(st.integers(0, len(body) - 1))
    damaged = body[:at] + bytes([body[at] ^ data.draw(st.integers(1, 255))]) + body[at + 1 :]
    (whole,) = decode_entry(T, 2, 7, body)
    try:
        read = decode_entry(T, 2, 7, damaged)
    except CodecError as error:
        assert "trajectory/t" in str(error)
    else:
        assert [r.digest for r in read] != [whole.digest]


@given(st.binary(max_size=200))
def test_any_bytes_are_an_entry_or_a_codec_error(body: bytes) -> None:
    try:
        recorded = decode_entry(T, 1, 5, body)
    except CodecError as error:
        assert error.where.startswith("trajectory/t")
    else:
        assert recorded


def newer(*event: object) -> bytes:
    """An entry that this version did not write."""
    return msgspec.msgpack.encode([[EVENT_ID, GENESIS, 1, list(event)]])


def test_an_event_of_a_newer_version_says_so() -> None:
    with pytest.raises(UnknownEventError, match="a newer Belayer wrote it: read it with that version") as caught:
        decode_entry(T, 1, 1, newer("teleported", 1))
    assert (caught.value.tag, caught.value.written_by) == ("teleported", "")
    with pytest.raises(UnknownEventError, match="'tokens-appended-2' is unknown"):
        decode_entry(T, 1, 1, newer("sealed", "k", b"n", b"s", ["tokens-appended-2", 1]))


def test_an_event_of_a_newer_version_names_it_when_its_group_does() -> None:
    group = [[EVENT_ID, GENESIS, 1, ["epoch-started", 1, "w", "7.0.0"]], [EVENT_ID, GENESIS, 1, ["teleported"]]]
    with pytest.raises(UnknownEventError, match=r"Belayer 7\.0\.0 wrote it"):
        decode_entry(T, 1, 2, msgspec.msgpack.encode(group))


def test_fields_that_a_newer_version_added_at_the_end_are_passed_over() -> None:
    assert decode_entry(T, 1, 1, newer("run-finished", "done", "a new field"))[0].event == events.RunFinished("done")


def test_an_old_tag_is_read_through_its_upcaster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(codec.UPCASTERS, "run-ended", lambda fields: ["run-finished", f"was {fields[1]}"])
    old = msgspec.msgpack.encode([[EVENT_ID, GENESIS, 1, ["run-ended", "done"]]])
    assert decode_entry(T, 1, 1, old)[0].event == events.RunFinished("was done")


def test_upcasters_follow_one_another_and_reach_into_sealed_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(codec.UPCASTERS, "acted", lambda fields: ["action-began", *fields[1:], 60.0])
    monkeypatch.setitem(codec.UPCASTERS, "action-began", lambda fields: ["action-started", *fields[1:], "i-1"])
    expected = events.ActionStarted(1, "ls", 60.0, "i-1")
    assert decode_entry(T, 1, 1, newer("acted", 1, "ls"))[0].event == expected
    assert decode_entry(T, 1, 1, newer("action-began", 1, "ls", 60.0))[0].event == expected
    (sealed,) = decode_entry(T, 1, 1, newer("sealed", "k", b"n", b"s", ["acted", 1, "ls"]))
    assert sealed.event == events.Sealed("k", b"n", b"s", expected)


def test_an_upcaster_whose_result_fits_nothing_is_an_error_that_names_the_old_tag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(codec.UPCASTERS, "run-ended", lambda fields: ["run-finished", 7])
    with pytest.raises(CodecError, match="an old 'run-ended' event that cannot be read"):
        decode_entry(T, 1, 1, newer("run-ended", "done"))


def test_a_reader_and_the_audit_name_the_version_that_wrote_an_unknown_event() -> None:
    started, digest = encode_entry(1, 0, GENESIS, [events.EpochStarted(1, "w", "7.1.0")], [EVENT_ID], 1)
    body = msgspec.msgpack.encode([[EVENT_ID, digest, 1, ["teleported", 1]]])
    with pytest.raises(UnknownEventError, match=r"Belayer 7\.1\.0 wrote it"):
        audit([(T, started), (T, Entry(1, 2, 1, body))])


async def test_a_newer_writer_stops_an_older_one_that_never_saw_its_events() -> None:
    """Mixed versions on one journal: each refuses only the streams that it cannot read."""
    store = MemoryStore()
    old, _ = await take_over(store, T, "old")
    started, digest = encode_entry(
        2,
        1,
        (await store.last(T)).digest,
        [events.EpochStarted(2, "new", "7.1.0")],
        [EVENT_ID],
        1,  # type: ignore[union-attr]
    )
    assert await store.take_over(T, await store.last(T), started) is None
    await store.append(T, Entry(2, 3, 1, msgspec.msgpack.encode([[EVENT_ID, digest, 1, ["teleported", 1]]])))
    for attempt in (Reader(store, T).catch_up(), take_over(store, T, "old")):
        with pytest.raises(UnknownEventError, match=r"sequence 3: .*Belayer 7\.1\.0 wrote it"):
            await attempt
    with pytest.raises(FencedError):
        await old.append(events.RunFinished("x"))
    other, history = await take_over(store, ids.trajectory("other"), "old")
    assert await other.append(events.GenerationStarted(1, "", "")) == 2
    assert history[0].event == events.EpochStarted(1, "old", __version__)


DEEP = b"\x91" * 5000
"""Arrays in arrays, far more than msgspec follows."""


@pytest.mark.parametrize(
    "event",
    [b"\x92" + msgspec.msgpack.encode("x") + DEEP, b"\x98" + msgspec.msgpack.encode("tokens-appended") + DEEP, DEEP],
)
def test_what_is_nested_too_deep_is_no_event(event: bytes) -> None:
    """RecursionError: whoever wrote such bytes ended every reader, the audit too."""
    head = b"\x91\x94" + msgspec.msgpack.encode(EVENT_ID) + msgspec.msgpack.encode(GENESIS) + b"\x01"
    for body in (head + event + b"\xc0", DEEP + b"\xc0"):
        with pytest.raises(CodecError, match="not an e"):
            decode_entry(T, 1, 1, body)
        assert [finding.check for finding in audit([(T, Entry(1, 1, 1, body))]).findings] == ["encoding"]


@pytest.mark.parametrize("body", [b"", b"\x90", b"\xdc", b"\xdd\x00", b"\xc0", b"hello"])
def test_what_is_no_entry_has_no_count(body: bytes) -> None:
    with pytest.raises(CodecError, match="here"):
        count_of("here", body)
