"""Token columns keep every value they accept and refuse every other."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer.errors import InputError
from belayer.journal.columns import (
    pack_logprobs,
    pack_loss_mask,
    pack_token_ids,
    unpack_logprobs,
    unpack_token_ids,
)

F32_MOST = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids(token_ids: list[int]) -> None:
    packed = pack_token_ids(token_ids)
    assert packed == struct.pack(f"<{len(token_ids)}I", *token_ids)
    assert unpack_token_ids(packed) == token_ids


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_logprobs(logprobs: list[float]) -> None:
    packed = pack_logprobs(logprobs)
    assert packed == struct.pack(f"<{len(logprobs)}f", *logprobs)
    assert unpack_logprobs(packed) == logprobs


@given(st.lists(st.floats(allow_nan=False)))
def test_a_logprob_is_rounded_to_f32_or_refused_but_never_becomes_infinite(logprobs: list[float]) -> None:
    try:
        back = unpack_logprobs(pack_logprobs(logprobs))
    except InputError:
        assert any(F32_MOST < abs(value) < math.inf for value in logprobs)
    else:
        assert [math.isinf(value) for value in back] == [math.isinf(value) for value in logprobs]


def test_any_iterable_will_do() -> None:
    assert unpack_logprobs(pack_logprobs(-n / 2 for n in range(3))) == [0.0, -0.5, -1.0]
    assert unpack_token_ids(pack_token_ids(range(3))) == [0, 1, 2]


@given(st.lists(st.sampled_from([0, 1, True, False])))
def test_loss_mask(mask: list[int]) -> None:
    assert list(pack_loss_mask(mask)) == mask


@pytest.mark.parametrize("bad", [[-1], [2**32], ["x"], [1.5], [None]])
def test_what_is_no_token_id_is_refused(bad: list) -> None:
    with pytest.raises(InputError, match="token ids"):
        pack_token_ids(bad)


@pytest.mark.parametrize("bad", [["x"], [None], [1e39], [-1e39], [-3.5e38], [10**400]])
def test_what_is_no_logprob_is_refused(bad: list) -> None:
    with pytest.raises(InputError, match="logprobs"):
        pack_logprobs(bad)


@pytest.mark.parametrize("bad", [[2], [-1], [256], ["x"]])
def test_what_is_no_mask_is_refused(bad: list) -> None:
    with pytest.raises(InputError, match="loss mask"):
        pack_loss_mask(bad)


def test_a_part_of_an_item_is_refused() -> None:
    with pytest.raises(InputError, match="7 bytes"):
        unpack_token_ids(bytes(7))
    with pytest.raises(InputError, match="5 bytes"):
        unpack_logprobs(bytes(5))
