"""Token columns in fewer bytes, for stores that are opened with a `token_form`: bfloat16 logprobs, zstd, or both.

A packed chunk holds the columns' byte planes one after the other: the first byte of every token id, the second, and so
on, then the logprobs' and the loss mask. Ids below 2**24 so have a plane of zeros, which is what zstd finds. bfloat16
is the upper half of an f32, rounded to nearest, ties to even, so a logprob is off by at most 0.2 % of itself. Reading
gives the TokensAppended back, with the rounded logprobs as f32.

A chunk that a form cannot hold (a NaN among logprobs that are to be rounded, columns that are not `count` long) is
stored plain. Bytes that are no such columns raise CodecError; InputError when zstd's package is missing.
"""

from __future__ import annotations

import functools
import threading
from typing import Literal

from belayer.errors import CodecError, InputError
from belayer.journal.columns import LOGPROB_BYTES, TOKEN_ID_BYTES
from belayer.journal.events import AnyEvent, StoredEvent, TokensAppended, TokensPacked

TokenForm = Literal["plain", "bf16", "zstd", "bf16+zstd"]
FORMS = ("plain", "bf16", "zstd", "bf16+zstd")
LEVEL = 1
"""Higher ones take several times as long and save 1 % of such chunks."""
BF16_BYTES = 2
_MOST_TOKENS = 1 << 22
"""In a packed chunk: more is not unpacked, since a small frame may claim to be anything."""


def checked_form(name: str) -> TokenForm:
    """The form of that name, or InputError; also when its package is missing."""
    if name not in FORMS:
        raise InputError(f"{name!r} is not a form of token columns; expected one of {', '.join(FORMS)}")
    if "zstd" in name:
        try:
            _zstd()
        except ModuleNotFoundError:
            raise InputError(
                f"token form {name!r} needs the package zstandard; pip install 'belayer[archive]'"
            ) from None
    return name


def packed(event: AnyEvent, form: TokenForm) -> StoredEvent:
    """The event as it is to be stored; only token chunks are packed."""
    if form == "plain" or not isinstance(event, TokensAppended):
        return event
    count = event.count
    sizes = (len(event.token_ids), len(event.logprobs), len(event.loss_mask))
    if sizes != (count * TOKEN_ID_BYTES, count * LOGPROB_BYTES, count) or not 0 < count <= _MOST_TOKENS:
        return event
    logprobs = event.logprobs
    if form != "zstd":
        if (rounded := _rounded(logprobs, count)) is None:
            return event
        logprobs = rounded
    columns = _planes(event.token_ids, TOKEN_ID_BYTES) + _planes(logprobs, len(logprobs) // count) + event.loss_mask
    if form != "bf16":
        columns = _zstd().compressor.compress(columns)
    return TokensPacked(event.generation, event.offset, count, form, columns, event.weight_version)


def unpacked(where: str, event: TokensPacked) -> TokensAppended:
    """What was packed."""
    if not 0 < (count := event.count) <= _MOST_TOKENS:
        raise CodecError(where, f"a packed chunk of {count} tokens")
    logprob_bytes = LOGPROB_BYTES if event.form == "zstd" else BF16_BYTES
    size_bytes = count * (TOKEN_ID_BYTES + logprob_bytes + 1)
    columns = event.columns if event.form == "bf16" else _decompressed(where, event.columns, size_bytes)
    if len(columns) != size_bytes:
        raise CodecError(where, f"{len(columns)} bytes of token columns where {count} tokens take {size_bytes}")
    end_of_ids, end = count * TOKEN_ID_BYTES, count * (TOKEN_ID_BYTES + logprob_bytes)
    token_ids = _rows(columns[:end_of_ids], TOKEN_ID_BYTES, TOKEN_ID_BYTES)
    logprobs = _rows(columns[end_of_ids:end], logprob_bytes, LOGPROB_BYTES)
    return TokensAppended(
        event.generation, event.offset, count, token_ids, logprobs, columns[end:], event.weight_version
    )


def _planes(column: bytes, item_bytes: int) -> bytes:
    """Items of `item_bytes` as their first bytes, then their second ones, and so on."""
    return b"".join(column[at::item_bytes] for at in range(item_bytes))


def _rows(planes: bytes, planes_count: int, item_bytes: int) -> bytes:
    """The items again: the planes are their last bytes; those before are zero."""
    count = len(planes) // planes_count
    column = bytearray(count * item_bytes)
    for plane in range(planes_count):
        column[item_bytes - planes_count + plane :: item_bytes] = planes[plane * count : (plane + 1) * count]
    return bytes(column)


@functools.lru_cache(maxsize=64)
def _lanes(count: int) -> tuple[int, ...]:
    """What `_rounded` needs in each of `count` lanes of 32 bits: a one, all but the sign, what a NaN lacks to set the
    sign, the sign, and almost half of the last place that stays."""
    ones = int.from_bytes(b"\x01\x00\x00\x00" * count, "little")
    return ones, ones * 0x7FFFFFFF, ones * 0x007FFFFF, ones * 0x80000000, ones * 0x7FFF


def _rounded(logprobs: bytes, count: int) -> bytes | None:
    """`count` x f32 to `count` x bf16, or None if one is NaN. All lanes at once, in one large integer: no lane of a
    number overflows into the next, since the largest, infinity, has its lower half free."""
    ones, magnitude, beyond_infinity, sign, half = _lanes(count)
    lanes = int.from_bytes(logprobs, "little")
    if ((lanes & magnitude) + beyond_infinity) & sign:
        return None
    rounded = lanes + half + (lanes >> 16 & ones)
    column = rounded.to_bytes(count * LOGPROB_BYTES, "little")
    halves = bytearray(count * BF16_BYTES)
    halves[0::2], halves[1::2] = column[2::4], column[3::4]
    return bytes(halves)


class _Zstd(threading.local):
    """Of one thread: they must not be used by two at once."""

    def __init__(self) -> None:
        import zstandard

        self.compressor = zstandard.ZstdCompressor(level=LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = functools.cache(_Zstd)
"""Imported only by those who use it."""


def _decompressed(where: str, frame: bytes, size_bytes: int) -> bytes:
    try:
        decompressor = _zstd().decompressor
    except ModuleNotFoundError:
        raise InputError(f"{where}: reading it needs the package zstandard; pip install 'belayer[archive]'") from None
    import zstandard

    try:
        if zstandard.frame_content_size(frame) != size_bytes:
            raise CodecError(where, f"not a zstd frame of {size_bytes} bytes of token columns")
        return decompressor.decompress(frame)
    except zstandard.ZstdError as error:
        raise CodecError(where, f"token columns that zstd cannot read: {error}") from None
