"""The device's health is known at once, whatever NVML does: it answers, fails, finds something, or hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from belayer.gpu.health import BoundedHealth, Look
from tests.waiting import until

DEADLINE_S = 20.0


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """An event that is set only at the end, so that a hanging look ends with its test."""
    event = threading.Event()
    yield event
    event.set()


async def until_it_says(health: Callable[[], str], text: str) -> None:
    await until(lambda: text in health(), what=f"evidence {text!r}")


async def test_a_device_that_answers_is_fit_and_what_it_says_once_stays() -> None:
    asked = threading.Semaphore(0)
    answers = iter(["", "", "XID 79"])

    def look() -> str:
        asked.release()
        return next(answers)

    health = BoundedHealth(lambda: look)
    assert asked.acquire(timeout=DEADLINE_S)
    await until_it_says(health, "XID 79")
    assert health() == "XID 79"


async def test_a_failing_nvml_is_evidence() -> None:
    def open_look() -> Look:
        raise OSError("no driver")

    await until_it_says(BoundedHealth(open_look), "NVML does not work: no driver")


async def test_a_hanging_nvml_blocks_nobody_and_is_evidence(never: threading.Event) -> None:
    hangs = threading.Event()

    def look() -> str:
        hangs.set()
        never.wait()
        return "the test is over"  # or the thread asks again and again until the whole suite is

    health = BoundedHealth(lambda: look, silence_s=0.2)
    assert hangs.wait(DEADLINE_S)
    began_s = time.monotonic()
    health()
    assert time.monotonic() - began_s < 0.1
    await until_it_says(health, "has not answered for")


async def test_an_nvml_that_hangs_when_it_is_opened_is_evidence_too(never: threading.Event) -> None:
    def open_look() -> Look:
        never.wait()
        return lambda: "the test is over"

    await until_it_says(BoundedHealth(open_look, silence_s=0.1), "has not answered for")
