"""What is asked of the engines in a handover measurement, and which kills are planned."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Load:
    """So many streams, each with a prompt of so many tokens."""

    streams: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Self:
        streams, _, context = text.partition("x")
        return cls(int(streams), int(context))

    def __str__(self) -> str:
        return f"{self.streams}x{self.context}"

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Stream n's prompt, the same in every run; a shorter context's is the beginning of a longer one's."""
        chosen = [random.Random(1000 + number) for number in range(self.streams)]
        return [[one.randrange(3, vocabulary) for _ in range(self.context)] for one in chosen]


@dataclass(frozen=True)
class Mode:
    """How a shadow takes over."""

    name: str
    adopt: bool
    early: bool
    zombie: bool = False


MODES = {
    mode.name: mode
    for mode in (
        Mode("early", True, True),
        Mode("late", True, False),
        Mode("refill", False, False),
        Mode("zombie", True, True, zombie=True),
    )
}


@dataclass(frozen=True)
class Kill:
    mode: Mode
    load: Load


def parse_kills(text: str) -> list[Kill]:
    """`late:64x2048*8,early:1x8192*2`."""
    plan: list[Kill] = []
    for part in filter(None, text.split(",")):
        what, _, count = part.partition("*")
        mode, _, load = what.partition(":")
        plan += [Kill(MODES[mode], Load.parse(load))] * int(count or 1)
    return plan
