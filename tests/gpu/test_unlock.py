"""What the driver does beside the scheduler's thread."""

from __future__ import annotations

import select
import threading

import pytest

from belayer.errors import InputError
from belayer.gpu.plugin.unlock import Unlock


def says(unlock: Unlock, timeout_s: float = 0) -> bool:
    """Whether it wakes whoever polls."""
    return bool(select.select([unlock], [], [], timeout_s)[0])


def test_it_is_done_beside_and_waited_for() -> None:
    unlock, allowed, entered = Unlock(), threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        allowed.wait(30)

    assert unlock.is_done and unlock.wait() == 0.0
    for _ in range(2):
        allowed.clear()
        entered.clear()
        unlock.begin(work)
        assert entered.wait(30) and not unlock.is_done and not says(unlock)
        allowed.set()
        assert says(unlock, 30)
        assert unlock.wait() > 0.0
        assert unlock.is_done and not says(unlock)


def test_what_goes_wrong_is_raised_where_it_is_waited_for() -> None:
    unlock = Unlock()

    def fail() -> None:
        raise InputError("no access")

    unlock.begin(fail)
    with pytest.raises(InputError, match="no access"):
        unlock.wait()
    assert unlock.is_done and not says(unlock)
