"""Token columns as packed little-endian bytes: u32 token ids, f32 logprobs, u8 loss mask.

Packing refuses what it cannot represent; unpacking refuses a length that is not a whole number of items.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence

from belayer.errors import InputError

TOKEN_ID_BYTES = 4
LOGPROB_BYTES = 4
TOKEN_BYTES = TOKEN_ID_BYTES + LOGPROB_BYTES + 1
"""Of a generated token in all three columns."""
_SWAP = sys.byteorder == "big"


def _pack(code: str, values: Iterable[float], what: str) -> bytes:
    """struct, not array: it is twice as fast, and array turns a float beyond f32's range into infinity."""
    column = values if isinstance(values, (list, tuple)) else list(values)
    try:
        return struct.pack(f"<{len(column)}{code}", *column)
    except (OverflowError, struct.error) as error:
        raise InputError(f"{what}: {error}") from None


def _unpack(code: str, packed: bytes, item_bytes: int, what: str) -> array[float]:
    if len(packed) % item_bytes:
        raise InputError(f"{what}: {len(packed)} bytes is not a multiple of {item_bytes}")
    column: array[float] = array(code)
    column.frombytes(packed)
    if _SWAP:
        column.byteswap()
    return column


def pack_token_ids(token_ids: Iterable[int]) -> bytes:
    """n token ids (0 to 2**32 - 1) to 4n bytes."""
    return _pack("I", token_ids, "token ids must be integers from 0 to 4294967295")


def unpack_token_ids(packed: bytes) -> list[int]:
    """4n bytes to n token ids."""
    return _unpack("I", packed, TOKEN_ID_BYTES, "token ids").tolist()  # type: ignore[return-value]


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """n logprobs (natural logarithm) to 4n bytes, rounded to f32. Infinity and NaN are kept as they are."""
    return _pack("f", logprobs, "logprobs must be numbers in the range of f32")


def unpack_logprobs(packed: bytes) -> list[float]:
    """4n bytes to n logprobs."""
    return _unpack("f", packed, LOGPROB_BYTES, "logprobs").tolist()


def pack_loss_mask(loss_mask: Sequence[int | bool]) -> bytes:
    """n zeros and ones to n bytes."""
    try:
        packed = bytes(loss_mask)
    except (TypeError, ValueError):
        packed = b"\x02"
    if packed.strip(b"\x00\x01"):
        raise InputError("the loss mask must hold only 0 and 1")
    return packed
