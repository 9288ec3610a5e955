"""The committed points of one trajectory, on whichever branch: all that the checks across streams keep of it.

32 bytes a boundary. A boundary is live from its own sequence to that of the rewind which superseded it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import NamedTuple

NEVER = 2**63 - 1


class Committed(NamedTuple):
    """A boundary as the index knows it."""

    number: int
    sequence: int
    superseded_at: int
    incarnation: str


class BoundaryIndex:
    """Boundaries in the order in which they were committed."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._sequences = array("q")
        self._superseded = array("q")
        self._incarnation = array("q")
        self._names: list[str] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, number: int, sequence: int, incarnation: str) -> None:
        """A boundary was committed in that sandbox incarnation."""
        if not self._names or self._names[-1] != incarnation:
            self._names.append(incarnation)
        self._numbers.append(number)
        self._sequences.append(sequence)
        self._superseded.append(NEVER)
        self._incarnation.append(len(self._names) - 1)

    def supersede(self, after_sequence: int, at: int) -> None:
        """A rewind at sequence `at` has cut everything after `after_sequence`."""
        for position in range(len(self._sequences) - 1, -1, -1):
            if self._sequences[position] <= after_sequence:
                break
            self._superseded[position] = min(self._superseded[position], at)

    def find(self, number: int, sequence: int) -> Committed | None:
        """The boundary of that name; None when it was never committed. The initial state is always there."""
        if (number, sequence) == (0, 0):
            return Committed(0, 0, NEVER, "")
        position = bisect_left(self._sequences, sequence)
        if position == len(self._sequences) or (self._sequences[position], self._numbers[position]) != (
            sequence,
            number,
        ):
            return None
        return Committed(number, sequence, self._superseded[position], self._names[self._incarnation[position]])
