"""An event as a person reads it: its tag and its fields on one line, token columns as counts; or as plain data."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from belayer.journal.columns import TOKEN_ID_BYTES, unpack_logprobs, unpack_token_ids
from belayer.journal.events import AnyEvent, Sealed, tag_of

_TOKENS = ("token_ids", "prompt", "observation")
_COLUMNS = (*_TOKENS, "logprobs", "loss_mask")


def in_words(event: AnyEvent) -> str:
    """`tag field=value ...`; a chunk's columns are left out, for its count is there."""
    if isinstance(event, Sealed):
        return f"{in_words(event.event)} (sealed with {event.key})"
    parts = [tag_of(event)]
    for name, value in _fields(event):
        if name == "prompt" or name == "observation":
            parts.append(f"{name}={len(value) // TOKEN_ID_BYTES} tokens")
        elif name not in _COLUMNS:
            parts.append(f"{name}={_short(value)}")
    return " ".join(parts)


def as_data(event: AnyEvent) -> dict[str, Any]:
    """The fields for JSON, tag first: token columns as lists of numbers, digests in hex."""
    if isinstance(event, Sealed):
        return as_data(event.event) | {"sealed_with": event.key}
    data: dict[str, Any] = {"tag": tag_of(event)}
    for name, value in _fields(event):
        if name in _TOKENS:
            data[name] = unpack_token_ids(value)
        elif name == "logprobs":
            data[name] = unpack_logprobs(value)
        elif name == "loss_mask":
            data[name] = list(value)
        elif isinstance(value, bytes):
            data[name] = value.hex()
        else:
            data[name] = msgspec.to_builtins(_by_name(value))
    return data


def _fields(event: AnyEvent) -> list[tuple[str, Any]]:
    return [(name, getattr(event, name)) for name in event.__struct_fields__]


def _by_name(value: Any) -> Any:
    """Structs inside events travel as arrays; for people their fields have names."""
    if isinstance(value, msgspec.Struct):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return [_by_name(one) for one in cast("tuple[Any, ...]", value)]
    return value


def _short(value: Any) -> str:
    match value:
        case bytes():
            return value.hex()[:12]
        case float():
            return f"{value:.3f}"
        case str():
            line = value if value.isprintable() else " ".join(value.split())
            line = line if len(line) <= 100 else f"{line[:97]}..."
            return line if line and " " not in line else repr(line)
        case msgspec.Struct() | dict() | tuple():
            return msgspec.json.encode(_by_name(value)).decode()
        case _:
            return str(value)
