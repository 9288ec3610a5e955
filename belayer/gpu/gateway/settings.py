"""What can be set on a gateway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from belayer.gpu.progress import HangRule


@dataclass(frozen=True, slots=True)
class Settings:
    """All times in seconds. `docs/gateway.md` says how each acts."""

    max_streams: int = 10_000
    """Open requests; one more gets 503."""
    on_disconnect: Literal["abort", "continue"] = "abort"
    """What becomes of a request whose callers have all left, after `grace_s`."""
    grace_s: float = 10.0
    request_timeout_s: float | None = None
    engine_wait_s: float = 60.0
    """How long a request waits for an engine that serves the current weights."""
    handover_wait_s: float = 2.0
    """How long it waits for its own engine's shadow before it goes to another engine."""
    journal_wait_s: float = 60.0
    """How long a request is held while the journal does not answer."""
    silence_s: float = HangRule().callers_s
    """An engine that says nothing for so long has failed the request. A weight update is a silence of all streams."""
    lag_tokens: int = 8192
    """An engine is not read on while every caller of its request is further behind than this."""
    appends_per_s: int = 4000
    """The journal appends that all streams together aim at."""
    adopts_kv: bool = False
    """The engines run Belayer's plugin, and a shadow adopts the KV cache."""
    drain_s: float = 30.0
    run: str = ""
    """The run that new trajectories belong to; empty: the worker's."""
    model: str = "default"
    """What /v1/models calls it."""
