"""Encrypted payloads: nothing of them is on the server, actors and audit need no key, and every wrong key is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from belayer import ids
from belayer.actors.archiver import Archiver
from belayer.client import Trajectory
from belayer.errors import InputError, MissingKeyError, ProtocolError, WrongKeyError
from belayer.journal.archive import open_archive
from belayer.journal.archived_store import ArchivedStore
from belayer.journal.codec import Recorded, decode_entry
from belayer.journal.connect import open_store
from belayer.journal.events import ActionCommitted, ActionStarted, Sealed, TokensAppended, TrajectoryStarted
from belayer.journal.memory_store import MemoryStore
from belayer.journal.sealing import VARIABLE, Keyring, generate_key
from belayer.journal.store import JournalStore
from belayer.journal.writer import Reader
from belayer.projections.trajectory import fold
from replay.audit import audit
from replay.describe import as_data, in_words
from tests.cli.command import belayer
from tests.journal.faults import command
from tests.waiting import DEADLINE_S

T = ids.trajectory("t")
OLD, NEW, OTHER = bytes(range(32)), bytes(range(1, 33)), bytes(32)
SECRET = "curl https://secret.example.org"
SEALABLE = [
    TrajectoryStarted("run", "task", b"\x01\x00\x00\x00", {"k": "v"}),
    TokensAppended(1, 0, 2, b"12345678", b"abcdefgh", b"\x01\x00", 5),
    ActionStarted(1, SECRET, 60.0, "i-1"),
    ActionCommitted(1, 0, b"\x05\x00\x00\x00", b"d" * 16, 0.25, True, 3),
]

GOLDEN = Path(__file__).with_name("golden_sealed.json")


def recorded(event: Sealed, stream: ids.StreamId = T) -> Recorded:
    return Recorded(stream, 1, 7, bytes(16), 0, bytes(16), bytes(16), event)


async def written(store: JournalStore) -> list[int]:
    """A trajectory with one generation and one action; its context."""
    trajectory = await Trajectory.open(store, "t", chunk_tokens=4)
    await trajectory.start("run", "task", [1, 2, 3], {"k": "v"})
    await trajectory.begin_generation()
    await trajectory.append_tokens([11, 12, 13, 14, 15], [-0.5] * 5)
    await trajectory.finish_generation("tool")
    await trajectory.start_action(SECRET, 5.0, "")
    await trajectory.commit_action(0, [0x2B2B2B2B], b"D" * 16, 0.1)
    await trajectory.finish("done", 1.0)
    return trajectory.state.context()


@pytest.mark.parametrize("event", SEALABLE, ids=lambda event: type(event).__name__)
def test_what_is_sealed_opens_again_and_only_where_it_was(event: TrajectoryStarted) -> None:
    keys = Keyring({"k1": OLD})
    sealed = keys.seal(T, event)
    assert isinstance(sealed, Sealed) and sealed.key == "k1"
    assert keys.open(recorded(sealed)).event == event
    for moved in (
        recorded(sealed, ids.trajectory("other")),
        recorded(replace(sealed, nonce=bytes(12))),
        recorded(replace(sealed, nonce=b"short")),
        recorded(replace(sealed, sealed=sealed.sealed[:-1] + bytes([sealed.sealed[-1] ^ 1]))),
        recorded(replace(sealed, sealed=b"")),
        recorded(replace(sealed, event=SEALABLE[0] if event is not SEALABLE[0] else SEALABLE[2])),
    ):
        with pytest.raises(WrongKeyError, match="sequence 7: key 'k1' does not open it"):
            keys.open(moved)


def test_golden_ciphertext_is_still_opened() -> None:
    """Sealed by 0.2 with the key of bytes 0 to 31: what is authenticated is part of the stored format."""
    keys = Keyring({"k1": OLD})
    for event, (nonce, sealed) in zip(SEALABLE, json.loads(GOLDEN.read_text()), strict=True):
        bare = keys.seal(T, event)
        assert isinstance(bare, Sealed)
        stored = replace(bare, nonce=bytes.fromhex(nonce), sealed=bytes.fromhex(sealed))
        assert keys.open(recorded(stored)).event == event


@given(st.binary(max_size=500).map(lambda raw: raw[: len(raw) // 4 * 4]))
def test_any_prompt_and_no_two_seals_alike(prompt: bytes) -> None:
    keys, event = Keyring({"k": NEW}), TrajectoryStarted("r", "t", prompt)
    one, two = keys.seal(T, event), keys.seal(T, event)
    assert one != two
    assert keys.open(recorded(one)).event == keys.open(recorded(two)).event == event  # type: ignore[arg-type]


def test_events_without_payload_are_as_they_are() -> None:
    from tests.journal.test_codec import EXAMPLES

    keys = Keyring({"k": NEW})
    for event in EXAMPLES:
        if type(event) not in {type(sealable) for sealable in SEALABLE}:
            assert keys.seal(T, event) is event


async def test_nothing_of_a_payload_is_on_the_server(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEYS", f"k1 {generate_key()}")
    store = await open_store(redis_url, namespace=namespace, encryption="env:SOME_KEYS", timeout_s=DEADLINE_S)
    context = await written(store)
    (dumped,) = [await command(redis_url, "DUMP", f"{{belayer:{namespace}:0}}:s:trajectory/t")]
    for plain in (b"secret.example", b"curl", b"\x0b\x00\x00\x00\x0c\x00\x00\x00", b"++++", b"D" * 16):
        assert plain not in dumped
    assert (await Trajectory.open(store, "t")).state.context() == context == [1, 2, 3, 11, 12, 13, 14, 15, 0x2B2B2B2B]
    async with store.subscribe("g", "c") as notices:
        tags = [(await notices.next(DEADLINE_S)).tag for _ in range(3)]  # type: ignore[union-attr]
    assert tags == ["trajectory-started", "action-committed", "trajectory-finished"]
    await store.close()


async def test_without_keys_structure_is_readable_and_payloads_are_refused() -> None:
    store = MemoryStore(keyring=Keyring({"k1": OLD}))
    await written(store)
    store.keyring = None
    state = fold(await Reader(store, T).catch_up())
    assert (state.phase, state.run, state.boundary.number, state.sealed_with) == ("finished", "run", 1, "k1")
    with pytest.raises(
        MissingKeyError, match="sealed with key 'k1'; there is no key here; name it in BELAYER_ENCRYPTION"
    ):
        state.context()
    generation = state.segments[0]
    with pytest.raises(ProtocolError, match="tokens are sealed"):
        generation.token_ids()  # type: ignore[union-attr]
    last = await store.last(T)
    with pytest.raises(MissingKeyError, match="trajectory/t"):
        await Trajectory.open(store, "t")
    assert await store.last(T) == last
    actors = fold(await Reader(store, T, from_mark=True).catch_up())
    assert actors.boundary == state.boundary and actors.sealed_with == ""


async def test_a_missing_and_a_wrong_key_name_it_and_its_place() -> None:
    store = MemoryStore(keyring=Keyring({"k1": OLD}))
    await written(store)
    store.keyring = Keyring({"k2": NEW, "k3": OTHER})
    with pytest.raises(
        MissingKeyError, match=r"trajectory/t at sequence 2: sealed with key 'k1'; the keys here are k2, k3"
    ):
        await Trajectory.open(store, "t")
    store.keyring = Keyring({"k1": NEW})
    with pytest.raises(WrongKeyError, match="trajectory/t at sequence 2: key 'k1' does not open it"):
        await Trajectory.open(store, "t")


async def test_rotation_reads_old_keys_and_writes_the_first() -> None:
    store = MemoryStore(keyring=Keyring({"k1": OLD}))
    trajectory = await Trajectory.open(store, "t")
    await trajectory.start("run", "task", [1])
    store.keyring = Keyring({"k2": NEW, "k1": OLD})
    trajectory = await Trajectory.open(store, "t")
    await trajectory.begin_generation()
    await trajectory.append_tokens([5], [-0.1])
    await trajectory.finish_generation("stop")
    assert (await Trajectory.open(store, "t")).state.context() == [1, 5]
    events = [
        e.event for entry in await store.read(T) for e in decode_entry(T, entry.epoch, entry.last_sequence, entry.body)
    ]
    assert [event.key for event in events if isinstance(event, Sealed)] == ["k1", "k2"]


async def test_a_journal_may_be_sealed_from_its_middle_on() -> None:
    store = MemoryStore()
    trajectory = await Trajectory.open(store, "t")
    await trajectory.start("run", "task", [1])
    store.keyring = Keyring({"k": NEW})
    trajectory = await Trajectory.open(store, "t")
    await trajectory.begin_generation()
    await trajectory.append_tokens([5], [-0.1])
    await trajectory.finish_generation("stop")
    assert (await Trajectory.open(store, "t")).state.context() == [1, 5]


async def test_audit_and_archive_need_no_key_and_find_a_changed_ciphertext(tmp_path: Path) -> None:
    keys = Keyring({"k1": OLD})
    store = MemoryStore(keyring=keys)
    context = await written(store)
    entries = await store.read(T)
    assert audit((T, entry) for entry in entries).findings == []
    body = entries[3].body
    changed = replace_body(entries, 3, body[:-30] + bytes([body[-30] ^ 1]) + body[-29:])
    assert [finding.check for finding in audit((T, entry) for entry in changed).findings] == ["digest"]
    store.keyring = None
    archive = open_archive(str(tmp_path), "n")
    assert await Archiver(store, archive, "archiver").archive(["t"]) == {"t": None}
    store.keyring = keys
    state = fold(await Reader(ArchivedStore(store, archive), T).catch_up())
    assert state.context() == context


def replace_body(entries: list, at: int, body: bytes) -> list:
    from belayer.journal.codec import Entry

    old = entries[at]
    return [*entries[:at], Entry(old.epoch, old.last_sequence, old.count, body), *entries[at + 1 :]]


def test_a_sealed_event_in_words() -> None:
    sealed = Keyring({"k1": OLD}).seal(T, SEALABLE[2])
    assert in_words(sealed).startswith("action-started action=1") and "(sealed with k1)" in in_words(sealed)
    assert as_data(sealed)["sealed_with"] == "k1" and as_data(sealed)["command"] == ""


# --- keys ------------------------------------------------------------------------------------------------------------


def test_keys_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# ours\nk2 {generate_key()}\n\nk1 {generate_key()}\n")
    keys = Keyring.load(f"file:{path}")
    assert keys.names == ["k2", "k1"] and repr(keys) == "Keyring(k2, k1)"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no encryption key"),
        ("k1", "line 1: expected file:PATH"),
        ("k1 geheim!", "line 1: expected file:PATH"),
        ("k1 Z2VoZWlt", "'k1' has 6 bytes"),
        (f"k1 {generate_key()}\nk1 {generate_key()}", "line 2: 'k1' comes twice"),
        (f"k/1 {generate_key()}", "'k/1' has 32 bytes"),
    ],
)
def test_keys_that_are_none_are_refused_without_showing_them(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEYS", text)
    with pytest.raises(InputError, match=said) as caught:
        Keyring.load("env:SOME_KEYS")
    assert "geheim" not in str(caught.value) and "Z2Vo" not in str(caught.value)


def test_a_reference_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        Keyring.load(f"file:{tmp_path}/none")
    with pytest.raises(InputError, match="no reference to encryption keys"):
        Keyring.load(generate_key())


async def test_the_verbs_open_with_the_keys_of_the_environment(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"k1 {generate_key()}\n")
    store = await open_store(redis_url, namespace=namespace, encryption=f"file:{path}", timeout_s=DEADLINE_S)
    await written(store)
    await store.close()
    place = {"BELAYER_JOURNAL_URL": redis_url, "BELAYER_NAMESPACE": namespace}
    assert "secret.example.org" in belayer("tail", "t", **place, **{VARIABLE: f"file:{path}"}).stdout
    assert "secret.example.org" not in belayer("tail", "t", **place).stdout
    assert belayer("audit", **place).returncode == 0
    assert belayer("timeline", "t", **place).returncode == 0
