"""Whether a container stands where it is to be captured: its runner idle after the expected action, as its marker says,
frozen or not; its memory all there."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from belayer.errors import CheckpointRefusedError
from belayer.sandbox import lazy
from belayer.sandbox.control import read_marker
from belayer.sandbox.limits import Bounds

SETTLE_S = 10.0
"""How long the runner may take from delivering its answer to saying that it is idle: at once, on a machine that is not
overloaded."""
POLL_S = 0.001
ASK_EVERY_S = 0.1


def await_idle(control: Path, incarnation: str, action: int, go_on: Callable[[], object]) -> None:
    """Return when it does. CheckpointRefusedError when it has gone on, or does not come to rest.

    `go_on` is asked meanwhile; it raises to end this.
    """
    settled = time.monotonic() + SETTLE_S
    while (marker := read_marker(control)) != ("idle", action):
        passed = marker is not None and (marker[1] > action or marker[0] == "idle")
        if passed or time.monotonic() > settled:
            refuse_marker(incarnation, action, marker)
        go_on()
        time.sleep(POLL_S)


def refuse_marker(incarnation: str, action: int, marker: tuple[str, int] | None) -> NoReturn:
    """CheckpointRefusedError: it stands elsewhere."""
    found = "not started" if marker is None else f"{marker[0]} with action {marker[1]}"
    raise CheckpointRefusedError(incarnation, f"it is {found}, not after {action}")


def await_memory(restoring: Path, bounds: Bounds, patience_s: float) -> None:
    """Return when the container's own restore has brought all its memory. CheckpointRefusedError when it has not."""
    until = time.monotonic() + patience_s
    while not lazy.wait(restoring, min(patience_s, ASK_EVERY_S)):
        bounds.go_on()
        if time.monotonic() >= until:
            bounds.refuse("its memory is still on its way from the last restore")
