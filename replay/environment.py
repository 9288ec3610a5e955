"""The environment's side of a trajectory, as its own stream tells it: which sandbox stands at which boundary.

The promise is prefix consistency: an action runs only in a sandbox that stands where the context stands. Whether a new
incarnation really came from the boundary that the trajectory names is for `replay.pairs` to check.
"""

from __future__ import annotations

from belayer.projections.trajectory import INITIAL, Boundary


class Environment:
    """Empty incarnations (rollouts without sandboxes of ours) are not judged."""

    def __init__(self) -> None:
        self.incarnation = ""
        self._at = INITIAL
        self._in_flight = 0

    def start_action(self, action: int, incarnation: str, live: Boundary) -> str | None:
        """Why the action must not run there; None when it may. From here on the writer is believed."""
        problem = self._problem(incarnation, live) if self.incarnation and incarnation else None
        self.incarnation, self._at, self._in_flight = incarnation, live, action
        return problem

    def commit(self, boundary: Boundary) -> None:
        """The action in flight has ended."""
        self._at, self._in_flight = boundary, 0

    def resume(self, incarnation: str, boundary: Boundary) -> bool:
        """The trajectory goes on in that incarnation. True when it is a new one, restored to the boundary."""
        if incarnation == self.incarnation:
            return False
        self.incarnation, self._at, self._in_flight = incarnation, boundary, 0
        return True

    def _problem(self, incarnation: str, live: Boundary) -> str | None:
        if incarnation != self.incarnation:
            return f"runs in {incarnation}, but the trajectory had gone on in {self.incarnation}"
        if self._in_flight:
            return f"runs in {incarnation}, where action {self._in_flight} had been left without an outcome"
        if self._at != live:
            return f"runs in {incarnation}, which stands at boundary {tuple(self._at)}; the context is at {tuple(live)}"
        return None
