"""The adaptive policy, and the simulator that compares it."""

from hypothesis import given
from hypothesis import strategies as st

from belayer.actors.policy import COOL_DOWN_S, CheckpointHistory, Outlook, decide, delay_s
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
