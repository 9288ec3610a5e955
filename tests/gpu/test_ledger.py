"""The ledger says what its writer completed: never more, whatever instant the writer died at."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer.gpu.errors import GeometryMismatchError
from belayer.gpu.gateway.settings import Settings
from belayer.gpu.ledger import Ledger, ledger_bytes, request_digest
from belayer.gpu.progress import HangRule, abandoned_update, hang_evidence

ROWS, WIDTH = 3, 32


def make() -> tuple[int, Ledger]:
    fd = os.memfd_create("ledger")
    os.ftruncate(fd, ledger_bytes(ROWS, WIDTH))
    return fd, Ledger(fd, ROWS, WIDTH)


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    fd, made = make()
    made.begin(1)
    yield made
    made.close()
    os.close(fd)


def test_all_but_the_last_token_of_a_row_are_proven(ledger: Ledger) -> None:
    ledger.write(1, request_digest("r"), 0, [10, 11, 12], 4)
    ledger.write(1, request_digest("r"), 3, [13], 4)
    (entry,) = ledger.proven(1)
    assert (entry.row, entry.request, list(entry.token_ids), entry.proven) == (
        1,
        request_digest("r"),
        [10, 11, 12, 13],
        3,
    )
    assert entry.weight_version == 4


def test_an_invalidated_row_proves_nothing(ledger: Ledger) -> None:
    ledger.write(0, 1, 0, [1, 2, 3], 0)
    ledger.invalidate(0)
    assert list(ledger.proven(1)) == []


def test_entries_of_an_earlier_epoch_do_not_count(ledger: Ledger) -> None:
    ledger.write(0, 1, 0, [1, 2, 3], 0)
    ledger.begin(3)
    assert list(ledger.proven(3)) == []
    assert list(ledger.proven(1)) == []


def test_an_entry_whose_writer_died_in_the_middle_is_unproven_until_it_is_written_again(ledger: Ledger) -> None:
    ledger.write(0, 1, 0, [1, 2, 3], 0)
    ledger._entries[0] |= 1  # what stands there between the first and the last store of a write
    assert list(ledger.proven(1)) == []
    ledger.write(0, 1, 0, [1, 2, 3, 4], 0)
    assert [entry.proven for entry in ledger.proven(1)] == [3]


def test_a_writer_killed_while_it_adds_tokens_leaves_the_row_proven() -> None:
    for _ in range(20):
        fd, reader = make()
        begun, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            writer = Ledger(fd, ROWS, WIDTH)
            writer.begin(1)
            writer.write(0, 1, 0, [100, 101], 0)
            os.write(tell, b"x")
            while True:
                for length in range(2, WIDTH):
                    writer.write(0, 1, length, [100 + length], 0)
        os.read(begun, 1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        (entry,) = reader.proven(1)
        assert list(entry.token_ids) == [100 + n for n in range(entry.proven + 1)]
        for end in (fd, begun, tell):
            os.close(end)


def test_another_process_reads_it_and_cannot_write_it() -> None:
    fd, writer = make()
    writer.begin(1)
    writer.write(2, 9, 0, [7, 8], 0)
    writer.reserve([100, 101])
    reader = Ledger(fd, ROWS, WIDTH, writable=False)
    assert [entry.row for entry in reader.proven(1)] == [2]
    assert list(reader.reserved(1)) == [100, 101]
    assert list(reader.reserved(2)) == []
    with pytest.raises(TypeError):
        reader.invalidate(2)
    os.close(fd)


def test_a_reserve_counts_once_the_steps_in_flight_have_ended() -> None:
    """They may write to slots that were freed, and so could be set aside, while they run."""
    fd, writer = make()
    writer.begin(1)
    writer.begin_step(4)
    writer.begin_step(4)
    writer.reserve([100, 101])
    writer.begin_step(4)
    writer.end_step(4)
    assert list(writer.reserved(1)) == []
    writer.end_step(4)
    assert list(writer.reserved(1)) == [100, 101]
    writer.reserve([100])
    assert list(writer.reserved(1)) == [], "the third step began before it was set aside"
    writer.end_step(4)
    assert list(writer.reserved(1)) == [100]
    os.close(fd)


def test_another_shape_is_refused() -> None:
    fd, _ = make()
    with pytest.raises(GeometryMismatchError, match="width"):
        Ledger(fd, ROWS, WIDTH - 8)
    os.close(fd)


@given(st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, 1), st.integers(1, 8)), max_size=40))
def test_it_reads_back_what_a_plain_model_holds(steps: list[tuple[int, int, int]]) -> None:
    fd, ledger = make()
    ledger.begin(5)
    model: dict[int, list[int]] = {}
    for row, drop, count in steps:
        if drop:
            ledger.invalidate(row)
            model.pop(row, None)
            continue
        held = model.get(row, [])
        if len(held) + count > WIDTH:
            held = []
        tokens = list(range(len(held), len(held) + count))
        ledger.write(row, row, len(held), tokens, 0)
        model[row] = held + tokens
    read = {entry.row: list(entry.token_ids) for entry in ledger.proven(5)}
    assert read == {row: tokens for row, tokens in model.items() if len(tokens) > 1}
    ledger.close()
    os.close(fd)


def test_a_prefill_of_a_minute_is_allowed_its_silence_and_a_decode_step_is_not() -> None:
    rule = HangRule()
    assert rule.allowed_s(0) < 3.0 and rule.allowed_s(2048) > 63.0 and rule.allowed_s(1 << 20) < 93.0


def test_callers_bear_every_silence_that_is_allowed() -> None:
    for rule in (HangRule(), HangRule(update_s=0.1), HangRule(update_s=3600.0), HangRule(base_s=600.0)):
        assert rule.callers_s > max(rule.update_s, rule.allowed_s(1 << 20))
    assert Settings().silence_s > HangRule().update_s, "a gateway with nothing set, and actors with nothing set"


def test_silence_counts_by_the_work_in_flight(ledger: Ledger) -> None:
    rule = HangRule(base_s=-1.0, per_token_s=1.0)  # a base in the past: any silence is longer than it
    assert "no prefill in flight" in hang_evidence(ledger.progress(), 1, os.getpid(), rule)
    ledger.begin_step(100)
    assert hang_evidence(ledger.progress(), 1, os.getpid(), rule) == ""
    ledger.end_step(100)
    assert hang_evidence(ledger.progress(), 1, os.getpid(), rule) != ""
    ledger.excuse(True)
    assert hang_evidence(ledger.progress(), 1, os.getpid(), rule) == ""


def test_a_weight_update_that_is_silent_for_too_long_is_a_hang(ledger: Ledger) -> None:
    """The trainer died in the middle of a broadcast: nobody else would ever say so."""
    ledger.excuse(True)
    assert hang_evidence(ledger.progress(), 1, os.getpid(), HangRule(base_s=-1.0)) == ""
    evidence = hang_evidence(ledger.progress(), 1, os.getpid(), HangRule(base_s=-1.0, update_s=-1.0))
    assert "in a weight update, -1.0 s allowed" in evidence
    ledger.excuse(False)
    assert hang_evidence(ledger.progress(), 1, os.getpid(), HangRule(base_s=60.0, update_s=-1.0)) == ""


def test_an_update_is_given_up_only_between_its_calls_and_each_call_gives_it_time(ledger: Ledger) -> None:
    at_once = HangRule(update_s=-1.0)
    assert abandoned_update(ledger.progress(), 7, at_once) == "", "no call of this holder's"
    ledger.excuse(True)
    assert abandoned_update(ledger.progress(), 7, at_once) == "", "in a call, whose silence counts"
    ledger.excuse(False)
    evidence = abandoned_update(ledger.progress(), 7, at_once)
    assert "to version 7 was neither continued nor ended" in evidence and "-1.0 s allowed" in evidence
    assert abandoned_update(ledger.progress(), 7, HangRule(update_s=60.0)) == ""
    ledger.begin(2)
    assert abandoned_update(ledger.progress(), 7, at_once) == "", "it was another holder's"
