"""When to checkpoint: only when it is expected to save more time than it costs.

Source: the adaptive policy of the Belayer paper (section 5), which compares at each boundary

    saving = failure probability until the next boundary x time to get from the last checkpoint to here again
    delay  = max(0, predicted duration of the checkpoint - predicted time of the next generation)

but a checkpoint goes on saving until the next one is taken. So what counts here is the expected loss that has
gathered since the last checkpoint, p x work x (actions + 1) / 2 for actions of equal length: the same for one action,
and for many the interval of Young and Daly, at which gathered loss and cost are equal. And generation times vary
widely, so the delay is the mean over the recent ones, not the delay at their mean. `benchmarks/policy.py` compares
the policy with the optimum.

Checkpoint when saving > delay. A checkpoint that fits into the next generation delays nothing, so it is taken
whenever anything could be lost. After one that ran into its time-out, wait 20 s.

Pure: what was measured comes in, a decision comes out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from belayer.journal.codec import Recorded
from belayer.journal.events import CheckpointDiscarded, CheckpointPublished, CheckpointStarted

Policy = Literal["every-boundary", "adaptive"]

COOL_DOWN_S = 20.0
TIMED_OUT_S = 30.0
"""A capture that was discarded this long after it was begun has run into a time-out, its own or another's patience."""
FAILURE_PROBABILITY = 0.01
"""Of an action, unless measured otherwise: the paper's rate."""
FIRST_GUESS_S = 0.5
"""The duration of a sandbox's first checkpoint, before there is a history."""
SMOOTHING = 0.3


class CheckpointHistory(msgspec.Struct, frozen=True):
    """What this sandbox's checkpoints have taken so far."""

    duration_s: float = FIRST_GUESS_S
    deviation_s: float = 0.0
    measured: int = 0
    timed_out_at_s: float | None = None
    """On the clock that `decide` is given."""
    begun_at_s: float | None = None
    """When the capture that is under way was begun; None when none is."""

    def took(self, total_s: float) -> CheckpointHistory:
        """One more was measured: moving averages of duration and deviation (as TCP's round-trip timer, RFC 6298)."""
        if not self.measured:
            return CheckpointHistory(total_s, total_s / 2, 1, self.timed_out_at_s)
        error_s = total_s - self.duration_s
        return CheckpointHistory(
            self.duration_s + SMOOTHING * error_s,
            self.deviation_s + SMOOTHING * (abs(error_s) - self.deviation_s),
            self.measured + 1,
            self.timed_out_at_s,
        )

    def timed_out(self, now_s: float) -> CheckpointHistory:
        """One was given up for taking too long."""
        return msgspec.structs.replace(self, timed_out_at_s=now_s, begun_at_s=None)

    @property
    def predicted_s(self) -> float:
        """A careful prediction: the average and one deviation more."""
        return self.duration_s + self.deviation_s


UNKNOWN = CheckpointHistory()


def history_of(events: Iterable[Recorded], history: CheckpointHistory = UNKNOWN) -> CheckpointHistory:
    """The history that a sandbox's stream tells, by the clocks of those who wrote it. What needed no capture does not
    count: the next one may need it."""
    for recorded in events:
        now_s = recorded.time_ns / 1e9
        match recorded.event:
            case CheckpointStarted():
                history = msgspec.structs.replace(history, begun_at_s=now_s)
            case CheckpointPublished():
                history = history.took(recorded.event.total_s)
            case CheckpointDiscarded() if history.begun_at_s is not None:
                late = now_s - history.begun_at_s >= TIMED_OUT_S
                history = history.timed_out(now_s) if late else msgspec.structs.replace(history, begun_at_s=None)
            case _:
                pass
    return history


class Outlook(msgspec.Struct, frozen=True):
    """What is known at a boundary."""

    work_since_checkpoint_s: float
    actions_since_checkpoint: int
    recent_generations_s: tuple[float, ...]
    """How long the last generations took: what the next one may take."""
    now_s: float
    failure_probability: float = FAILURE_PROBABILITY


def saving_s(outlook: Outlook) -> float:
    """The expected loss that has gathered since the last checkpoint."""
    weight = (outlook.actions_since_checkpoint + 1) / 2
    return outlook.failure_probability * outlook.work_since_checkpoint_s * weight


def delay_s(outlook: Outlook, history: CheckpointHistory) -> float:
    """The expected time by which a checkpoint here holds the next action up."""
    bubbles_s = outlook.recent_generations_s or (0.0,)
    return sum(max(0.0, history.predicted_s - bubble_s) for bubble_s in bubbles_s) / len(bubbles_s)


def decide(outlook: Outlook, history: CheckpointHistory) -> bool:
    """Whether to checkpoint at this boundary."""
    since = history.timed_out_at_s
    if since is not None and 0 <= outlook.now_s - since < COOL_DOWN_S:  # before: the clock was set back since
        return False
    return saving_s(outlook) > delay_s(outlook, history)
