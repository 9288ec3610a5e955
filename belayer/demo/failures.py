"""The failures of a run: which kind, when. Pure: the seed and the undisturbed run decide, nothing else.

An instant is a point in the trajectory's own progress, not a time: 'after 40 tokens of generation 12', 'while action 9
runs'. So each kind strikes its phase, however fast the machine is; a small random delay moves it within the phase.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from belayer.errors import InputError


class Kind(enum.StrEnum):
    """What is done to the run. Each is a SIGKILL; Redis is started again at once."""

    ENGINE = "engine"
    """The main engine, in the middle of a generation."""
    IDLE = "container-idle"
    """The container, while the model generates."""
    ACTION = "container-action"
    """The container, while an action runs."""
    CHECKPOINT = "container-checkpoint"
    """The container, while a checkpoint of it is taken."""
    RECOVERY = "recovery"
    """The actor process that is recovering a killed container, in the middle of it."""
    REDIS = "redis"
    """The journal's server, in the middle of a generation."""
    PUBLISH = "publish"
    """The actor process that is taking a checkpoint, before it is published."""


class Profile(NamedTuple):
    """What the undisturbed run was like: what the instants are chosen from."""

    tokens: tuple[int, ...]
    """How many tokens each generation has."""
    durations_s: tuple[float, ...]
    """How long each action took; action n belongs to generation n or an earlier one."""


class Planned(NamedTuple):
    """One failure to come. It strikes at the first fitting instant not before generation or action `number`."""

    kind: Kind
    number: int
    tokens: int
    """How many tokens of the generation come first, for kinds that strike in one."""
    delay_s: float


_LONGEST_DELAY_S = 0.02
_LONG_ACTION_S = 0.2
"""A shorter action is likely to be over before a kill hits it."""
_LONG_GENERATION_TOKENS = 240
"""In a shorter generation the container is hardly ever idle: the checkpoint of the action before goes on."""


def parse_kinds(text: str) -> list[Kind]:
    """`--failures`: a number of failures, whose kinds come in turn, or kinds separated by commas."""
    if text.isdecimal():
        return [list(Kind)[index % len(Kind)] for index in range(int(text))]
    try:
        return [Kind(word.strip()) for word in text.split(",")]
    except ValueError:
        raise InputError(
            f"{text!r} is neither a number nor kinds of failures; the kinds are {', '.join(Kind)}"
        ) from None


def plan_failures(seed: int, name: str, kinds: Sequence[Kind], profile: Profile) -> list[Planned]:
    """The kinds in random order, each at a random instant of its own part of the trajectory, in order of progress.

    InputError when the trajectory is too short to give each failure a part of at least one turn.
    """
    rng = random.Random(f"{seed}/{name}")
    turns = min(len(profile.tokens), len(profile.durations_s))
    usable = turns - 1
    if len(kinds) > usable:
        raise InputError(f"{name} has {turns} turns, too few for {len(kinds)} failures; at most {max(usable, 0)} fit")
    parts = [
        range(1 + usable * index // len(kinds), 1 + usable * (index + 1) // len(kinds)) for index in range(len(kinds))
    ]
    planned: list[Planned] = []
    for kind, part in _assigned(rng, kinds, parts, profile):
        number = _number(rng, kind, part, profile)
        tokens = rng.randrange(1, max(2, profile.tokens[number - 1] // 2))
        longest_s = (
            min(_LONGEST_DELAY_S, profile.durations_s[number - 1] / 4) if kind is Kind.ACTION else _LONGEST_DELAY_S
        )
        planned.append(Planned(kind, number, tokens, rng.uniform(0.0, longest_s)))
    return sorted(planned, key=lambda failure: failure.number)


def _assigned(
    rng: random.Random, kinds: Sequence[Kind], parts: Sequence[range], profile: Profile
) -> Iterator[tuple[Kind, range]]:
    """Each kind with a part of the trajectory, at random; kinds that need room choose first among parts with room."""
    left = list(parts)
    for kind in sorted(kinds, key=lambda kind: kind not in (Kind.ACTION, Kind.IDLE)):
        fitting = left
        if kind in (Kind.ACTION, Kind.IDLE):
            lengths, enough = _room(kind, profile)
            longest = [max(lengths[number - 1] for number in part) for part in left]
            fitting = [part for part, one in zip(left, longest, strict=True) if one >= min(enough, max(longest))]
        part = rng.choice(fitting)
        left.remove(part)
        yield kind, part


def _room(kind: Kind, profile: Profile) -> tuple[Sequence[float], float]:
    """What gives a strike of this kind room, turn by turn, and how much of it is enough."""
    return (profile.durations_s, _LONG_ACTION_S) if kind is Kind.ACTION else (profile.tokens, _LONG_GENERATION_TOKENS)


def _number(rng: random.Random, kind: Kind, part: range, profile: Profile) -> int:
    match kind:
        case Kind.ACTION | Kind.IDLE:
            lengths, _ = _room(kind, profile)
            return max(part, key=lambda number: lengths[number - 1])
        case Kind.ENGINE | Kind.RECOVERY | Kind.REDIS:
            longer = sorted(part, key=lambda number: -profile.tokens[number - 1])
            return rng.choice(longer[: max(1, len(longer) // 3)])
        case Kind.CHECKPOINT | Kind.PUBLISH:
            return rng.choice(part)
