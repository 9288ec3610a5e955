"""Which recorded token comes next after a prefix: the whole intelligence of the recorded engine, pure.

A context is a prompt, then turns and observations in alternation. A turn is what the model said, `END` last. After it
come the observations of its actions: a role token, text, `END`, and after the last of them `ASSISTANT`, as a chat
template has it. Observations are free, since the environment is real; prompt and turns must be the recording's to the
token, and the prefix must end inside a turn or where one begins. Anything else is a PrefixRefusedError: whoever asked
has resumed wrongly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from belayer.errors import InputError, PrefixRefusedError

SYSTEM, USER, ASSISTANT, TOOL, CALL, END = range(256, 262)
"""Token ids of the roles, of the beginning of an action and of the end of a message. Below them are the 256 bytes."""
FIRST_TEXT = 272
"""Token ids from here on are pieces of text; those between are reserved."""

SUFFIX = ".recording.json"


class TokenRecording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One trajectory's model, as token ids: the prompt with `ASSISTANT` last, and the turns with `END` last."""

    name: str
    prompt: list[int]
    turns: list[list[int]]

    def turn(self, index: int) -> list[int]:
        """The turn with this index, from 0; after the last one an empty turn says that the recording has ended."""
        return self.turns[index] if index < len(self.turns) else [END]


class Position(NamedTuple):
    """The next token is `offset` tokens into turn `turn` (both from 0)."""

    recording: TokenRecording
    turn: int
    offset: int


def load(folder: Path) -> list[TokenRecording]:
    """All recordings of a folder. InputError for one that cannot be read, or when there is none."""
    recordings: list[TokenRecording] = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            recordings.append(msgspec.json.decode(path.read_bytes(), type=TokenRecording))
        except (OSError, msgspec.DecodeError) as error:
            raise InputError(f"{path}: not a recording of token ids ({error})") from None
    if not recordings:
        raise InputError(f"{folder}: no file *{SUFFIX} is here; an engine needs at least one recording")
    return recordings


def locate(recordings: Sequence[TokenRecording], prefix: Sequence[int]) -> Position:
    """Where the prefix ends. PrefixRefusedError, with the first wrong offset, when no recording goes on from there."""
    refused: list[PrefixRefusedError] = []
    for recording in recordings:
        try:
            return _locate(recording, prefix)
        except PrefixRefusedError as error:
            refused.append(error)
    raise max(refused, key=lambda error: error.offset)


def logprob(recording: str, turn: int, offset: int, token_id: int) -> float:
    """The token's logprob: made up, but the same for the same token at the same place, and exact in f32."""
    place = f"{recording}/{turn}/{offset}/{token_id}".encode()
    return -int.from_bytes(hashlib.blake2b(place, digest_size=2).digest(), "little") / 8192


def _locate(recording: TokenRecording, prefix: Sequence[int]) -> Position:
    at = _matched(recording.prompt, prefix, 0)
    if at < len(recording.prompt):
        raise PrefixRefusedError(at, f"the prompt of {recording.name} goes on differently")
    for index in range(len(recording.turns) + 1):
        turn = recording.turn(index)
        matched = _matched(turn, prefix, at)
        at += matched
        if matched < len(turn):
            if at == len(prefix):
                return Position(recording, index, matched)
            raise PrefixRefusedError(at, f"turn {index + 1} of {recording.name} goes on differently")
        at = _skip_observations(prefix, at, max(1, turn.count(CALL)), f"turn {index + 1} of {recording.name}")
    raise PrefixRefusedError(at, f"{recording.name} has ended")


def _matched(expected: Sequence[int], prefix: Sequence[int], at: int) -> int:
    """How many tokens from `at` on are the expected ones."""
    given = prefix[at : at + len(expected)]
    if given == expected:
        return len(expected)
    for count, (mine, theirs) in enumerate(zip(expected, given, strict=False)):
        if mine != theirs:
            return count
    return len(given)


def _skip_observations(prefix: Sequence[int], at: int, count: int, after: str) -> int:
    for _ in range(count):
        if at == len(prefix) or prefix[at] not in (TOOL, USER):
            raise PrefixRefusedError(at, f"{after} is complete and needs {count} observations next")
        at += 1
        while at < len(prefix) and (prefix[at] < SYSTEM or prefix[at] >= FIRST_TEXT):
            at += 1
        if at == len(prefix) or prefix[at] != END:
            raise PrefixRefusedError(at, f"an observation after {after} is not ended")
        at += 1
    if at == len(prefix) or prefix[at] != ASSISTANT:
        raise PrefixRefusedError(at, f"nothing asks for the next turn after {after}")
    return at + 1
