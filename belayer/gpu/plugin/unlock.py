"""The driver lets the KV be written while the scheduler's thread goes on with what needs no KV.

Changing the access to a cache takes the driver milliseconds, most of them waiting for itself while it tears the dead
process down; it holds no lock of Python's meanwhile. So it is done in a thread beside the adoption, and the first step
waits for it. What goes wrong there is raised in the scheduler's thread, and ends it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Unlock:
    """One unlocking at a time. `fileno` is readable once it is done, until it is waited for."""

    def __init__(self) -> None:
        self._ended = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = ThreadPoolExecutor(1, "belayer-unlock")
        self._begun: Future[float] | None = None

    def fileno(self) -> int:
        return self._ended

    def begin(self, work: Callable[[], None]) -> None:
        assert self._begun is None
        self._begun = self._thread.submit(self._run, work)

    def _run(self, work: Callable[[], None]) -> float:
        began_s = time.monotonic()
        try:
            work()
        finally:
            os.eventfd_write(self._ended, 1)
        return time.monotonic() - began_s

    @property
    def is_done(self) -> bool:
        """Whether `wait` would not wait, also because nothing was begun."""
        return self._begun is None or self._begun.done()

    def wait(self) -> float:
        """Until what was begun is done; the seconds that it took, 0.0 when nothing was begun. Raises what it raised."""
        begun, self._begun = self._begun, None
        if begun is None:
            return 0.0
        try:
            return begun.result()
        finally:
            os.eventfd_read(self._ended)
