"""The device's health is known at once, whatever NVML does: it answers, fails, finds something, or hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from belayer.gpu.health import BENIGN_XIDS, BoundedHealth, Look, _open_nvml, device_health, main
from tests.gpu.recorded_nvml import RecordedGpu, replay
from tests.waiting import DEADLINE_S, until, within


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
    await within(asyncio.to_thread(health))
    await until_it_says(health, "has not answered for")


async def test_an_nvml_that_hangs_when_it_is_opened_is_evidence_too(never: threading.Event) -> None:
    def open_look() -> Look:
        never.wait()
        return lambda: "the test is over"

    await until_it_says(BoundedHealth(open_look, silence_s=0.1), "has not answered for")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RecordedGpu]]:
    """Two GPUs; CUDA sees the second alone, as its cuda:0. Their threads end with the test: what is found is found."""
    two = [RecordedGpu("0000:1B:00.0"), RecordedGpu("0000:C1:00.0")]
    replay(monkeypatch, two, visible=two[1:])
    yield two
    for gpu in two:
        gpu.xids.put(79)


async def test_the_gpu_that_cuda_uses_is_watched_not_nvmls_of_that_number(gpus: list[RecordedGpu]) -> None:
    """With recorded answers in NVML's and CUDA's place (see recorded_nvml.py): no machine of CI has a GPU."""
    health = device_health("cuda:0")
    gpus[0].xids.put(79)
    gpus[1].xids.put(48)
    await until_it_says(health, "XID 48")


async def test_a_programs_own_fault_and_old_ecc_errors_are_no_evidence_but_a_new_one_is(
    gpus: list[RecordedGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With recorded answers (see recorded_nvml.py)."""
    monkeypatch.setattr("belayer.gpu.health._EVENT_WAIT_MS", 20)
    gpus[1].ecc_errors = 3
    look = _open_nvml("0000:C1:00.0")
    for xid in sorted(BENIGN_XIDS):
        gpus[1].xids.put(xid)
        assert look() == ""
    assert look() == "", "silence is no error"
    gpus[1].ecc_errors = 5
    assert look() == "2 new uncorrected ECC errors"


async def test_a_gpu_without_xid_events_is_said_to_have_none_and_watched_for_ecc(
    gpus: list[RecordedGpu],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With recorded answers (see recorded_nvml.py)."""
    monkeypatch.setattr("belayer.gpu.health._EVENT_WAIT_MS", 20)
    gpus[1].offers_events = False
    look = _open_nvml("0000:C1:00.0")
    assert "0000:C1:00.0 is watched for ECC errors alone: NVML offers no XID events" in caplog.text
    gpus[1].ecc_errors = 1
    assert look() == "1 new uncorrected ECC errors"
    assert main() == 0
    assert capsys.readouterr().out == "0000:C1:00.0: NVML offers no XID events (Not Supported)\n"
