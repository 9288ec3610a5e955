"""Is an engine hung? By its own step counter, which a dead or stopped scheduler cannot move.

A prefill of many tokens may take long, so the silence that is allowed grows with those in flight; a loop without work
beats at least once a second. A weight update may wait for its trainer, in a call or between two, but not for ever:
nobody else would see that the trainer is gone. A stopped process makes no progress whatever it was doing, so it gets
only the base allowance.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from belayer.gpu.ledger import Progress

_TO_BE_KILLED_S = 20.0


@dataclass(frozen=True, slots=True)
class HangRule:
    """The allowed silence: `base_s`, and `per_token_s` more for each token of the prefills in flight, up to `most_s`.

    So a prefill of 2,000 tokens may take a minute. A decode step gets nothing more: it is a small part of a second. One
    call of a weight update may take `update_s`, and so long may an update that was begun wait for its next call or its
    end: 64 GB from a disk that reads 250 MB/s take 260 s; from memory, another GPU or the page cache it is seconds
    (8 GB took 0.1 to 1.2 s).
    """

    base_s: float = 2.5
    per_token_s: float = 0.03
    most_s: float = 90.0
    update_s: float = 300.0

    def allowed_s(self, tokens_in_flight: int) -> float:
        return self.base_s + min(self.most_s, self.per_token_s * max(0, tokens_in_flight))

    @property
    def callers_s(self) -> float:
        """How long callers should bear an engine that says nothing: no less than this rule does, and a kill takes."""
        return max(self.base_s + self.most_s, self.update_s) + _TO_BE_KILLED_S


def hang_evidence(progress: Progress, epoch: int, pid: int, rule: HangRule) -> str:
    """Why the engine that writes under `epoch` counts as hung, or "" when it does not."""
    if not progress.serving or progress.epoch != epoch:
        return ""
    silent_s = (time.monotonic_ns() - progress.beat_ns) / 1e9
    if silent_s <= rule.base_s:
        return ""
    if _is_stopped(pid):
        return f"process {pid} is stopped and its scheduler was silent for {silent_s:.1f} s"
    allowed_s = rule.update_s if progress.updating else rule.allowed_s(progress.tokens_in_flight)
    if silent_s <= allowed_s:
        return ""
    work = (
        "in a weight update"
        if progress.updating
        else f"{progress.tokens_in_flight} prefill tokens in flight"
        if progress.tokens_in_flight > 0
        else "no prefill in flight"
    )
    return f"the scheduler was silent for {silent_s:.1f} s ({work}, {allowed_s:.1f} s allowed)"


def abandoned_update(progress: Progress, version: int, rule: HangRule) -> str:
    """Why the update to that version, which the engine has begun and not ended, counts as given up, or ""."""
    waited_s = (time.monotonic_ns() - progress.update_ns) / 1e9
    if progress.updating or not progress.update_ns or waited_s <= rule.update_s:
        return ""
    return (
        f"the weight update to version {version} was neither continued nor ended for {waited_s:.1f} s "
        f"({rule.update_s:.1f} s allowed): its trainer is taken for dead"
    )


def _is_stopped(pid: int) -> bool:
    """State T or t in /proc/PID/stat, proc(5)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[stat.rindex(b")") + 2 :][:1] in (b"T", b"t")
