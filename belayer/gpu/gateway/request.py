"""What is asked of a model, whichever API it came through, and what of it survives an engine.

Invariant: a parameter that the gateway cannot keep across a resume is refused by name, never dropped: a request is
answered as one engine would have answered it, or not at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import msgspec

from belayer.errors import InputError
from belayer.gpu.gateway.errors import wrong
from belayer.gpu.protocol import Sampling
from belayer.ids import checked_name, new_suffix

TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Texts = str | list[str] | None

_NEUTRAL: Mapping[str, object] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "n": 1,
    "best_of": 1,
    "spaces_between_special_tokens": True,
    "logprob_start_len": -1,
}
"""Values that change nothing; without an entry, so are null, false, 0 and what is empty."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request to a model. Of `prompt` (token ids) and `text` one is given."""

    rid: str
    trajectory: str
    """Empty: a trajectory of its own, named by `rid`."""
    task: str
    prompt: list[int]
    text: str | None
    adds_special_tokens: bool
    """Whether the tokenizer's own first token belongs before `text`."""
    max_new_tokens: int | None
    min_new_tokens: int = 0
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    others: Mapping[str, object] = field(default_factory=dict[str, object])
    stops: tuple[str, ...] = ()
    trims_stops: bool = True
    skips_special_tokens: bool = True

    @property
    def name(self) -> str:
        """The trajectory's name."""
        return self.trajectory or self.rid

    @property
    def fingerprint(self) -> str:
        """8 hex digits that differ when anything but the prompt does."""
        kept = [getattr(self, name) for name in _FINGERPRINTED]
        return hashlib.blake2b(msgspec.json.encode(kept, order="sorted"), digest_size=4).hexdigest()

    def sampling(self, offset: int) -> Sampling:
        """What to ask an engine for after `offset` tokens. Stop strings are the gateway's own business."""
        others = {**self.others, "skip_special_tokens": self.skips_special_tokens}
        if self.min_new_tokens > offset:
            others["min_new_tokens"] = self.min_new_tokens - offset
        left = None if self.max_new_tokens is None else self.max_new_tokens - offset
        return Sampling(left, self.temperature, self.stop_token_ids, others)


_FINGERPRINTED = (
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "stop_token_ids",
    "others",
    "stops",
    "trims_stops",
    "skips_special_tokens",
)


@dataclass(frozen=True, slots=True)
class Form:
    """How the caller wants the answer."""

    stream: bool
    logprobs: bool = False
    offset: int = 0
    """The caller has this many tokens already."""
    usage: bool = True
    """In a stream: say the usage at the end."""
    token_ids: bool = False
    kind: Literal["generate", "completion", "chat"] = "generate"


def only_neutral(what: str, values: Mapping[str, Any]) -> None:
    """Refuse every value that would change the answer."""
    for name, value in values.items():
        if value is not None and (value != _NEUTRAL[name] if name in _NEUTRAL else value):
            raise wrong(
                f"{what}{name}={value!r} cannot be kept when an engine is replaced in mid-stream, so it is not "
                "offered; leave it out, or ask the engine itself"
            )


def _stop_strings(stop: Texts) -> tuple[str, ...]:
    """The stop strings, without empty ones."""
    return tuple(text for text in ([stop] if isinstance(stop, str) else stop or []) if text)


class Named(Protocol):
    """The part of a request's body that says what the request is."""

    rid: str | None
    trajectory: str | None
    task: str


class Sampled(Protocol):
    """The part that says how tokens are chosen, and when they end."""

    temperature: float | None
    stop: Texts
    stop_token_ids: list[TokenId] | None
    no_stop_trim: bool | None
    skip_special_tokens: bool | None


def asked(
    given: Named,
    sampling: Sampled,
    headers: Mapping[str, str],
    *,
    prompt: list[int] | None = None,
    text: str | None = None,
    adds_special_tokens: bool = True,
    max_new_tokens: int | None,
    min_new_tokens: int | None,
    others: Mapping[str, object],
) -> Asked:
    """The request. Its id (the body's, else the header's, else a new one) names a trajectory, so it must be a name."""
    trajectory = given.trajectory or headers.get("X-Belayer-Trajectory")
    return Asked(
        rid=_name("rid", given.rid or headers.get("X-Request-Id") or f"r-{new_suffix()}{new_suffix()}"),
        trajectory=_name("X-Belayer-Trajectory", trajectory) if trajectory else "",
        task=given.task,
        prompt=prompt or [],
        text=text,
        adds_special_tokens=adds_special_tokens,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens or 0,
        temperature=1.0 if sampling.temperature is None else sampling.temperature,
        stop_token_ids=tuple(sorted(set(sampling.stop_token_ids or ()))),
        others=others,
        stops=_stop_strings(sampling.stop),
        trims_stops=not sampling.no_stop_trim,
        skips_special_tokens=sampling.skip_special_tokens is not False,
    )


def _name(what: str, value: str) -> str:
    try:
        return checked_name(value)
    except InputError as error:
        raise wrong(f"{what}: {error}") from None
