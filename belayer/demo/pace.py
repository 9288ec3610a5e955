"""How long the recorded model took: its times, from the recording's time stamps, for a run that keeps them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from belayer.errors import InputError


def generation_times_s(path: Path) -> list[float]:
    """How long each generation of a mini-swe-agent recording took; 0 where its time stamps do not tell.

    The file has been read as a recording before. InputError when it cannot be read any more.
    """
    try:
        document = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    times_s: list[float] = []
    last_s: float | None = None
    for message in document["messages"] if isinstance(document, dict) else document:
        extra: dict[str, Any] = message.get("extra") or {}
        at_s = extra.get("timestamp")
        if message["role"] == "assistant":
            begun_s = last_s if last_s is not None else (extra.get("response") or {}).get("created", at_s)
            times_s.append(max(0.0, at_s - begun_s) if at_s is not None and begun_s is not None else 0.0)
        last_s = at_s if at_s is not None else last_s
    return times_s


def paced(times_s: list[float], pace: float) -> Callable[[int], float]:
    """What generation n, from 1, must take when everything goes `pace` times as fast; 0 beyond the recording."""
    return lambda number: times_s[number - 1] / pace if number <= len(times_s) else 0.0
