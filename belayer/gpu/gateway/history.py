"""What a trajectory's stream says about a request: is it finished, unfinished, or new, and where would it go on.

Which request a generation belongs to stands in the name of the writer that began its epoch. `place` is pure: from the
stream's events and the request alone it says what is to be done, or refuses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from belayer.gpu.gateway.errors import RefusedError, conflict
from belayer.gpu.gateway.request import Asked
from belayer.gpu.gateway.text import Tokenizer
from belayer.journal.codec import Recorded
from belayer.journal.columns import unpack_token_ids
from belayer.journal.events import EpochStarted, GenerationStarted
from belayer.projections.trajectory import Boundary, Generation, Step, TrajectoryState, fold

_WRITER = "gateway"


def writer_of(asked: Asked) -> str:
    """The name under which a gateway writes for this request."""
    return f"{_WRITER}/{asked.rid}/{asked.fingerprint}"


class Owner(NamedTuple):
    """The request that a generation was begun for."""

    rid: str
    fingerprint: str


class History(NamedTuple):
    """A trajectory's state, and the owners of its generations by number, as far as they came through a gateway."""

    state: TrajectoryState
    owners: dict[int, Owner]


def read(events: Iterable[Recorded]) -> History:
    """Fold a trajectory's whole stream."""
    recorded = list(events)
    owners: dict[int, Owner] = {}
    owner: Owner | None = None
    for entry in recorded:
        match entry.event:
            case EpochStarted(writer=writer):
                parts = writer.split("/")
                owner = Owner(parts[1], parts[2]) if parts[0] == _WRITER and len(parts) == 3 else None
            case GenerationStarted(generation=number):
                owners.pop(number, None)
                if owner is not None:
                    owners[number] = owner
            case _:
                pass
    return History(fold(recorded), owners)


@dataclass(frozen=True, slots=True)
class Place:
    """What is to be done for a request whose prompt is `prompt` (token ids)."""

    prompt: list[int]
    generation: Generation | None = None
    """The request's own generation: to be replayed when it is finished, to be resumed when it is not."""
    rewind: Boundary | None = None
    """First give up everything after this boundary."""
    observation: tuple[int, ...] = ()
    """Then record these tokens, which the caller's environment gave."""


def place(history: History, asked: Asked, tokenizer: Tokenizer | None) -> Place:
    """Where the request belongs. RefusedError when the trajectory cannot take it."""
    state, owners = history
    numbers = [number for number, owner in owners.items() if owner.rid == asked.rid]
    for number in numbers:
        if (found := _generation(state, number)) is not None:
            generation, before = found
            prompt = _prompt(asked, before, tokenizer)
            if prompt != before or owners[number].fingerprint != asked.fingerprint:
                raise _reused(asked)
            return Place(prompt, generation)
    if state.phase == "empty":
        return Place(_prompt(asked, [], tokenizer))
    if state.phase in ("finished", "aborted"):
        if asked.trajectory:
            raise conflict("trajectory_ended", f"trajectory {asked.name} is {state.phase}; name another one")
        raise _reused(asked)
    if state.action is not None:
        raise conflict(
            "action_in_flight",
            f"action {state.action.action} of trajectory {asked.name} has no outcome yet; commit it, then ask again",
        )
    return _continued(state, asked, tokenizer)


def _continued(state: TrajectoryState, asked: Asked, tokenizer: Tokenizer | None) -> Place:
    """A new request on a trajectory that is under way."""
    base, context = _at_boundary(state), state.context()
    prompt = _prompt(asked, context, tokenizer)
    if state.generation is None and prompt[: len(context)] == context:
        if len(prompt) == len(context):
            return Place(prompt)
        if state.generations:
            return Place(prompt, observation=tuple(prompt[len(context) :]))
    again = _prompt(asked, base, tokenizer)
    if again == base:
        return Place(again, rewind=state.boundary)
    same = next((at for at, (a, b) in enumerate(zip(prompt, context, strict=False)) if a != b), None)
    where = f"is {len(prompt)} tokens long" if same is None else f"differs from it at token {same}"
    raise conflict(
        "prompt_differs",
        f"trajectory {asked.name} has {len(context)} tokens and the prompt {where}; a request goes on from the whole "
        "trajectory, or repeats its last request's prompt. History is token ids: send those that came, or name another "
        "trajectory",
    )


def _reused(asked: Asked) -> RefusedError:
    return conflict("rid_reused", f"rid {asked.rid} belongs to another request already; give each request its own")


def _prompt(asked: Asked, before: list[int], tokenizer: Tokenizer | None) -> list[int]:
    """The prompt's token ids. Text that begins as the tokens before it read keeps these: it is not tokenized again."""
    if asked.text is None:
        return asked.prompt
    assert tokenizer is not None
    if before and (known := tokenizer.decode(before, skip_special_tokens=False)) == asked.text[: len(known)]:
        return before + tokenizer.encode(asked.text[len(known) :], special=False)
    return tokenizer.encode(asked.text, asked.adds_special_tokens)


def _generation(state: TrajectoryState, number: int) -> tuple[Generation, list[int]] | None:
    """The generation of that number and the tokens before it."""
    before = unpack_token_ids(state.prompt)
    for segment in state.segments:
        match segment:
            case Generation():
                if segment.number == number:
                    return segment, before
                before += segment.token_ids()
            case Step():
                before += unpack_token_ids(segment.committed.observation)
    generation = state.generation
    return (generation, before) if generation is not None and generation.number == number else None


def _at_boundary(state: TrajectoryState) -> list[int]:
    """The tokens up to the newest boundary."""
    segments = list(state.segments)
    while segments and not isinstance(segments[-1], Step):
        segments.pop()
    tokens = unpack_token_ids(state.prompt)
    for segment in segments:
        match segment:
            case Generation():
                tokens += segment.token_ids()
            case Step():
                tokens += unpack_token_ids(segment.committed.observation)
    return tokens
