import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer.demo.failures import Kind, Profile, parse_kinds, plan_failures
from belayer.errors import InputError

turns = st.tuples(st.integers(1, 400), st.floats(0.0, 5.0))
profiles = st.lists(turns, min_size=2, max_size=40).map(
    lambda pairs: Profile(tuple(tokens for tokens, _ in pairs), tuple(took_s for _, took_s in pairs))
)
kinds = st.lists(st.sampled_from(list(Kind)), max_size=12)


@given(st.integers(), profiles, kinds)
def test_a_plan_has_each_kind_once_within_the_trajectory_in_order(
    seed: int, profile: Profile, kinds: list[Kind]
) -> None:
    usable = len(profile.tokens) - 1
    if len(kinds) > usable:
        with pytest.raises(InputError, match="too few"):
            plan_failures(seed, "t", kinds, profile)
        return
    plan = plan_failures(seed, "t", kinds, profile)
    assert sorted(failure.kind for failure in plan) == sorted(kinds)
    numbers = [failure.number for failure in plan]
    assert numbers == sorted(set(numbers)), "two failures would strike in one turn"
    assert all(1 <= number <= usable for number in numbers)
    assert all(failure.tokens >= 1 for failure in plan)
    assert all(0.0 <= failure.delay_s <= 0.02 for failure in plan)
    assert plan_failures(seed, "t", kinds, profile) == plan


def test_seeds_and_names_differ() -> None:
    profile = Profile((100,) * 40, (0.1,) * 40)
    plans = [plan_failures(seed, name, list(Kind), profile) for seed in range(10) for name in ("a", "b")]
    assert len({tuple(plan) for plan in plans}) == len(plans)


def test_kinds_that_need_room_strike_where_there_is_some() -> None:
    tokens = tuple(500 if number == 3 else 50 for number in range(1, 31))
    profile = Profile(tokens, tuple(1.0 if number == 17 else 0.01 for number in range(1, 31)))
    for seed in range(20):
        plan = plan_failures(seed, "t", list(Kind), profile)
        assert [failure.number for failure in plan if failure.kind is Kind.ACTION] == [17]
        assert [failure.number for failure in plan if failure.kind is Kind.IDLE] == [3]


def test_kinds_are_given_by_number_or_by_name() -> None:
    assert parse_kinds(str(len(Kind))) == list(Kind)
    assert parse_kinds(str(len(Kind) + 2)) == [*Kind, Kind.ENGINE, Kind.IDLE]
    assert parse_kinds("redis, engine") == [Kind.REDIS, Kind.ENGINE]
    assert parse_kinds("0") == []
    with pytest.raises(InputError, match="container-idle"):
        parse_kinds("engine,fire")
