"""What is asked of a model, whichever API it came through, and what of it survives an engine.

Invariant: a parameter that the gateway cannot keep across a resume is refused by name, never dropped: a request is
answered as one engine would have answered it, or not at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

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


def stop_strings(stop: Texts) -> tuple[str, ...]:
    """The stop strings, without empty ones."""
    return tuple(text for text in ([stop] if isinstance(stop, str) else stop or []) if text)


def request_id(given: str | None, header: str | None) -> str:
    """The request's id: the body's, else the header's, else a new one. It names a trajectory, so it must be a name."""
    return _name("rid", given or header or f"r-{new_suffix()}{new_suffix()}")


def trajectory_name(given: str | None) -> str:
    """The trajectory that the request belongs to; empty when none is named."""
    return _name("X-Belayer-Trajectory", given) if given else ""


def _name(what: str, value: str) -> str:
    try:
        return checked_name(value)
    except InputError as error:
        raise wrong(f"{what}: {error}") from None
