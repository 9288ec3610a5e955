"""Token chunks in fewer bytes: every form reads back, bfloat16 rounds as it says, and nothing else is read."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer import ids
from belayer.client import Trajectory
from belayer.errors import CodecError, InputError
from belayer.journal.codec import GENESIS, decode_entry, encode_event
from belayer.journal.columns import pack_logprobs, pack_token_ids, unpack_logprobs
from belayer.journal.connect import FORM_VARIABLE, open_store
from belayer.journal.events import AnyEvent, GenerationStarted, StoredEvent, TokensAppended, TokensPacked
from belayer.journal.memory_store import MemoryStore
from belayer.journal.packing import TokenForm, packed, unpacked
from belayer.journal.redis_store import RedisStore
from belayer.journal.writer import Reader
from replay.audit import audit
from tests.journal.faults import opened

T = ids.trajectory("t")
GOLDEN = Path(__file__).with_name("golden_packed.json")
PACKED: tuple[TokenForm, ...] = ("bf16", "zstd", "bf16+zstd")
F32 = st.floats(width=32, allow_nan=False)


def chunk(logprobs: list[float], token_ids: list[int] | None = None) -> TokensAppended:
    count = len(logprobs)
    columns = (pack_token_ids(token_ids or range(count)), pack_logprobs(logprobs), bytes([1, 0] * count)[:count])
    return TokensAppended(3, 40, count, *columns, 7)


def bf16(value: float) -> float:
    """The nearest bfloat16, ties to even, by its definition: the nearer of the two f32 whose lower half is zero."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    below, rest = bits & 0xFFFF0000, bits & 0xFFFF
    up = rest > 0x8000 or (rest == 0x8000 and bool(below & 0x10000))
    nearest: float = struct.unpack("<f", struct.pack("<I", below + 0x10000 * up))[0]
    return nearest


def body_of(event: StoredEvent) -> bytes:
    return encode_event(2, 6, GENESIS, event, bytes(range(16)), 1_700_000_000_000_000_000).body


def read(body: bytes) -> AnyEvent:
    return decode_entry(T, 2, 7, body)[0].event


@given(st.lists(F32, min_size=1, max_size=70), st.data())
def test_every_form_reads_back(logprobs: list[float], data: st.DataObject) -> None:
    ids_of = st.lists(st.integers(0, 2**32 - 1), min_size=len(logprobs), max_size=len(logprobs))
    plain = chunk(logprobs, data.draw(ids_of))
    rounded = msgspec.structs.replace(plain, logprobs=pack_logprobs([bf16(each) for each in logprobs]))
    for form in PACKED:
        stored = packed(plain, form)
        assert isinstance(stored, TokensPacked)
        assert read(body_of(stored)) == (plain if form == "zstd" else rounded)
    for value, again in zip(logprobs, unpack_logprobs(rounded.logprobs), strict=True):
        assert again == value or math.isinf(again) or abs(again - value) <= max(abs(value) / 256, 2.0**-134)


@pytest.mark.parametrize("form", PACKED)
def test_golden_bytes_of_every_form_are_read(form: TokenForm) -> None:
    """What zstd writes is its version's business; what it wrote is read for ever. bf16 alone is written so for ever."""
    event = chunk([0.0, -0.5, -1.0009765625, -math.inf], [1, 151_643, 2**32 - 1, 0])
    (golden,) = json.loads(GOLDEN.read_text())[form]
    if form == "bf16":
        assert body_of(packed(event, form)).hex() == golden
    logprobs = event.logprobs if form == "zstd" else pack_logprobs([0.0, -0.5, -1.0, -math.inf])
    assert read(bytes.fromhex(golden)) == msgspec.structs.replace(event, logprobs=logprobs)


def test_what_a_form_cannot_hold_is_stored_plain() -> None:
    not_a_number = chunk([-0.5, math.nan])
    for pattern in (0xFFFFFFFF, 0x7F800001):
        assert packed(msgspec.structs.replace(not_a_number, logprobs=struct.pack("<fI", 1.0, pattern)), "bf16") == (
            msgspec.structs.replace(not_a_number, logprobs=struct.pack("<fI", 1.0, pattern))
        )
    assert packed(not_a_number, "bf16+zstd") == not_a_number
    assert read(body_of(packed(not_a_number, "zstd"))) == not_a_number
    short = msgspec.structs.replace(chunk([-0.5]), loss_mask=b"")
    none = chunk([])
    other = GenerationStarted(1, "w", "w-1")
    for form in PACKED:
        assert packed(short, form) == short
        assert packed(none, form) == none
        assert packed(other, form) == other


def test_columns_that_are_none_are_refused_with_the_place() -> None:
    stored = packed(chunk([-0.5] * 8), "bf16+zstd")
    assert isinstance(stored, TokensPacked)
    damaged = [
        {"columns": stored.columns[:-1]},
        {"columns": b"no frame"},
        {"form": "bf16"},
        {"form": "zstd"},
        {"count": 9},
        {"count": 0},
        {"count": 1 << 40},
    ]
    for change in damaged:
        with pytest.raises(CodecError, match="trajectory/t at sequence 7"):
            read(body_of(msgspec.structs.replace(stored, **change)))
    with pytest.raises(CodecError, match="here"):
        unpacked("here", msgspec.structs.replace(stored, columns=b""))


async def rolled_out(store: MemoryStore | RedisStore) -> None:
    trajectory = await Trajectory.open(store, "t", chunk_tokens=64)
    await trajectory.start("run", "task", [1, 2, 3])
    await trajectory.begin_generation()
    await trajectory.append_tokens(list(range(100)), [-0.1] * 100)
    await trajectory.finish_generation("stop")
    await trajectory.finish("done", 1.0)


@pytest.mark.parametrize("form", PACKED)
async def test_a_rollout_is_folded_and_audited_as_ever(form: TokenForm) -> None:
    store, plain = MemoryStore(token_form=form), MemoryStore()
    await rolled_out(store)
    await rolled_out(plain)
    entries = await store.read(T)
    assert sum(b"tokens-packed" in entry.body for entry in entries) == 2
    assert sum(len(each.body) for each in entries) < sum(len(each.body) for each in await plain.read(T))
    report = audit((T, entry) for entry in entries)
    assert report.findings == []
    events = [recorded.event for recorded in await Reader(store, T).catch_up()]
    expected = [recorded.event for recorded in await Reader(plain, T).catch_up()]
    assert [type(event) for event in events] == [type(event) for event in expected]
    again, before = await Trajectory.open(store, "t"), await Trajectory.open(plain, "t")
    assert again.state.context() == before.state.context()


async def test_a_store_keeps_chunks_in_the_form_that_it_was_opened_with(
    redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORM_VARIABLE, "bf16")
    packing = await opened(redis_store.address, namespace="packing")
    await rolled_out(packing)
    monkeypatch.delenv(FORM_VARIABLE)
    store = await opened(redis_store.address, namespace="packing")
    assert store.token_form == "plain"
    assert sum(b"tokens-packed" in entry.body for entry in await store.read(T)) == 2
    chunks = [e.event for e in await Reader(store, T).catch_up() if isinstance(e.event, TokensAppended)]
    assert [each.count for each in chunks] == [64, 36]
    assert unpack_logprobs(chunks[0].logprobs) == [bf16(-0.1)] * 64
    await packing.close()
    await store.close()


async def test_an_unknown_form_names_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'bf8' is not a form of token columns; expected one of plain, bf16, zstd"):
        await open_store("redis://127.0.0.1:1", token_form="bf8")
