"""The adaptive policy, and the simulator that compares it."""

from hypothesis import given
from hypothesis import strategies as st

from belayer import ids
from belayer.actors.policy import COOL_DOWN_S, CheckpointHistory, Outlook, decide, delay_s, history_of
from belayer.journal.codec import Recorded
from belayer.journal.events import (
    ActionCommitted,
    AnyEvent,
    CheckpointDiscarded,
    CheckpointExtended,
    CheckpointPublished,
    CheckpointStarted,
    EpochStarted,
)
from belayer.projections import tempo
from benchmarks.policy import Timing, adaptive, cost, optimum, policies

seconds = st.floats(0.01, 100.0)


def test_a_checkpoint_that_fits_into_the_next_generation_is_taken() -> None:
    history = CheckpointHistory().took(0.2)
    assert decide(
        Outlook(work_since_checkpoint_s=5.0, actions_since_checkpoint=1, recent_generations_s=(3.0,), now_s=0.0),
        history,
    )


def test_a_slow_checkpoint_waits_until_enough_could_be_lost() -> None:
    history = CheckpointHistory().took(2.0)
    assert not decide(
        Outlook(work_since_checkpoint_s=5.0, actions_since_checkpoint=1, recent_generations_s=(1.0,), now_s=0.0),
        history,
    )
    assert decide(
        Outlook(work_since_checkpoint_s=500.0, actions_since_checkpoint=1, recent_generations_s=(1.0,), now_s=0.0),
        history,
    )


def test_after_a_timeout_the_policy_cools_down() -> None:
    history = CheckpointHistory().took(0.1).timed_out(now_s=100.0)
    outlook = Outlook(
        work_since_checkpoint_s=1000.0,
        actions_since_checkpoint=1,
        recent_generations_s=(10.0,),
        now_s=100.0 + COOL_DOWN_S - 1,
    )
    assert not decide(outlook, history)
    assert decide(Outlook(1000.0, 1, (10.0,), 100.0 + COOL_DOWN_S), history)


@given(st.lists(seconds, min_size=1, max_size=20))
def test_the_prediction_stays_within_what_was_measured(durations: list[float]) -> None:
    history = CheckpointHistory()
    for duration in durations:
        history = history.took(duration)
    assert min(durations) * 0.99 <= history.duration_s <= max(durations) * 1.01
    assert history.predicted_s >= history.duration_s
    assert delay_s(Outlook(0.0, 0, (), 0.0), history) == history.predicted_s


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=12), st.floats(0.001, 0.2), st.floats(0.05, 30.0))
def test_nothing_beats_the_offline_optimum(turns: list[tuple[float, float]], rate: float, checkpoint_s: float) -> None:
    timing = Timing("drawn", [g for g, _ in turns], [a for _, a in turns])
    best = cost(timing, optimum(timing, rate, checkpoint_s), rate, checkpoint_s).total_s
    for policy in policies(rate, checkpoint_s).values():
        assert cost(timing, policy(timing), rate, checkpoint_s).total_s >= best - 1e-6
    assert len(adaptive(timing, rate, checkpoint_s)) == len(turns)


def told(*events: tuple[float, AnyEvent]) -> CheckpointHistory:
    """The history of a sandbox whose events came at these times."""
    stream = ids.sandbox("t")
    return history_of(
        Recorded(stream, 1, sequence, b"", int(at_s * 1e9), b"", b"", event)
        for sequence, (at_s, event) in enumerate(events, 1)
    )


def test_a_sandboxs_stream_tells_what_its_captures_took() -> None:
    started = CheckpointStarted("c", "box", 1, 9)
    published = CheckpointPublished("c", "box", 1, 9, 10, 0.01, 2.0)
    extended = CheckpointExtended("c", "d", "box", 2, 19, 0.001, 0.002)
    history = told((1.0, started), (3.0, published), (4.0, started), (4.1, extended))
    assert (history.measured, history.duration_s, history.timed_out_at_s) == (1, 2.0, None)
    refused = told((1.0, started), (1.2, CheckpointDiscarded("c", "it has moved on")))
    assert refused.timed_out_at_s is None
    late = told((1.0, started), (3.0, published), (10.0, started), (100.0, CheckpointDiscarded("c", "given up")))
    assert (late.timed_out_at_s, late.took(1.0).timed_out_at_s) == (100.0, 100.0)


def test_a_clock_that_is_set_back_ends_the_cool_down() -> None:
    history = CheckpointHistory().took(0.1).timed_out(now_s=100_000.0)
    assert decide(Outlook(1000.0, 1, (10.0,), now_s=10.0), history)


def test_work_counts_on_after_a_clock_was_set_back() -> None:
    hour_ns = 3600 * 10**9
    times_ns = [10 * hour_ns, 11 * hour_ns, 2 * hour_ns, 3 * hour_ns]  # set back by nine hours after the second event
    events = [EpochStarted(1, "a"), *(ActionCommitted(number, 0, b"", b"", 0.1) for number in (1, 2, 3))]
    state = tempo.fold(
        Recorded(ids.trajectory("t"), 1, sequence, b"", time_ns, b"", b"", event)
        for sequence, (time_ns, event) in enumerate(zip(times_ns, events, strict=True), 1)
    )
    assert (state.work_since_s(2, 0), state.work_since_s(3, 2), state.work_since_s(4, 2)) == (3600.0, 0.0, 3600.0)
