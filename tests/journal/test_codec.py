"""Stored bytes are a promise: the golden bytes of an event tag never change, and nothing that is not ours is read."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer import ids
from belayer.errors import CodecError, UnknownEventError
from belayer.journal import codec, events
from belayer.journal.codec import (
    GENESIS,
    KNOWN_TAGS,
    count_of,
    decode_entry,
    encode_entry,
    encode_event,
    previous_digest_of,
)
from belayer.journal.events import AnyEvent, tag_of

GOLDEN = Path(__file__).with_name("golden.json")
T = ids.trajectory("t")
EVENT_ID = bytes(range(16))
SPEC = events.SandboxSpec("image", "/testbed", {"A": "b"}, ("true",), 1 << 30, 1.5)

EXAMPLES: list[AnyEvent] = [
    events.EpochStarted(3, "rollout"),
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
    events.TrajectoryResumed(1, 9, "i-2"),
    events.TrajectoryFinished("done", 1.0),
    events.TrajectoryAborted("given up"),
    events.Sealed("k1", bytes(12), b"ciphertext and tag", events.TokensAppended(1, 0, 2, b"", b"", b"", 5)),
    events.SandboxCreated("i-1", "c0ffee", "sha256:0", "host", 17, 12345, "run", SPEC),
    events.CheckpointStarted("c-1", "i-1", 1, 9),
    events.CheckpointPublished("c-1", "i-1", 1, 9, 4096, 0.01, 0.5),
    events.CheckpointExtended("c-1", "c-2", "i-1", 2, 14, 0.001, 0.01),
    events.CheckpointDiscarded("c-1", "not idle"),
    events.SandboxRestored("c-1", 1, 9, "i-2", "c0ffee", "sha256:0", "host", 18, 12346, 0.3),
    events.SandboxRemoved("i-1", "finished"),
    events.WorkerRegistered("w-1", "main", "host", 19, 12347, "http://127.0.0.1:1", "run"),
    events.WorkerReady("w-1", 5),
    events.HandoverCompleted("w-1", "w-2", 0.2, {"fence": 0.05, "adopt": 0.01}, 4096),
    events.WorkerRemoved("w-1", "finished"),
    events.RunStarted("host", 1, 12, "everysec", "0.1.0"),
    events.RunFinished("done"),
    events.WeightsPublished(6),
    events.TrainerCheckpointed(4, 6, "/checkpoints/4"),
]


def encoded(event: AnyEvent) -> bytes:
    return encode_entry(2, 6, GENESIS, [event], [EVENT_ID], 1_700_000_000_000_000_000)[0].body


def test_every_tag_has_an_example_and_golden_bytes() -> None:
    assert {tag_of(event) for event in EXAMPLES} == KNOWN_TAGS
    assert set(json.loads(GOLDEN.read_text())) == KNOWN_TAGS


@pytest.mark.parametrize("event", EXAMPLES, ids=tag_of)
def test_golden_bytes_are_written_and_read(event: AnyEvent) -> None:
    golden = bytes.fromhex(json.loads(GOLDEN.read_text())[tag_of(event)])
    assert encoded(event) == golden
    (recorded,) = decode_entry(T, 2, 7, golden)
    assert recorded.event == event
    assert (recorded.sequence, recorded.epoch, recorded.event_id) == (7, 2, EVENT_ID)


def test_a_handover_written_before_it_had_phases_is_still_read() -> None:
    written = "9194c410000102030405060708090a0b0c0d0e0fc41000000000000000000000000000000000cf17979cfe362a0000"
    written += "94b268616e646f7665722d636f6d706c65746564a3772d31a3772d32cb3fc999999999999a"
    (recorded,) = decode_entry(ids.worker("w"), 2, 7, bytes.fromhex(written))
    assert recorded.event == events.HandoverCompleted("w-1", "w-2", 0.2)


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


def test_an_event_of_a_newer_version_says_so() -> None:
    newer = msgspec.msgpack.encode([[EVENT_ID, GENESIS, 1, ["teleported", 1]]])
    with pytest.raises(UnknownEventError) as caught:
        decode_entry(T, 1, 1, newer)
    assert caught.value.tag == "teleported"


def test_fields_that_a_newer_version_added_at_the_end_are_passed_over() -> None:
    newer = msgspec.msgpack.encode([[EVENT_ID, GENESIS, 1, ["run-finished", "done", "a new field"]]])
    assert decode_entry(T, 1, 1, newer)[0].event == events.RunFinished("done")


def test_an_old_tag_is_read_through_its_upcaster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(codec.UPCASTERS, "run-ended", lambda fields: ["run-finished", f"was {fields[1]}"])
    old = msgspec.msgpack.encode([[EVENT_ID, GENESIS, 1, ["run-ended", "done"]]])
    assert decode_entry(T, 1, 1, old)[0].event == events.RunFinished("was done")


@pytest.mark.parametrize("body", [b"", b"\x90", b"\xdc", b"\xdd\x00", b"\xc0", b"hello"])
def test_what_is_no_entry_has_no_count(body: bytes) -> None:
    with pytest.raises(CodecError, match="here"):
        count_of("here", body)
