"""What the ledger says of requests, step by step: nothing before it is proved, nothing after the row is given away."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from belayer.gpu.ledger import Ledger, ledger_bytes
from belayer.gpu.plugin.rows import Rows

ROWS, WIDTH = 4, 16


@dataclass
class Request:
    """As far as SGLang's own is looked at."""

    rid: str
    req_pool_idx: int | None
    origin_input_ids: list[int]
    output_ids: list[int] = field(default_factory=list[int])
    extra_key: str | None = None


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    fd = os.memfd_create("ledger")
    os.ftruncate(fd, ledger_bytes(ROWS, WIDTH))
    made = Ledger(fd, ROWS, WIDTH)
    made.begin(1)
    yield made
    os.close(fd)


def said(ledger: Ledger) -> dict[int, list[int]]:
    return {entry.row: list(entry.token_ids) for entry in ledger.proven(1)}


def test_a_request_is_said_from_its_second_decode_step_on(ledger: Ledger) -> None:
    rows, request = Rows(), Request("a", 2, [1, 2, 3])
    request.output_ids += [4, 5]  # of the prefill and of the first decode step
    rows.decoded(ledger, [request], 0)
    assert said(ledger) == {}, "the first decode step was launched before the row's slots were moved"
    request.output_ids += [6]
    rows.decoded(ledger, [request], 0)
    assert said(ledger) == {2: [1, 2, 3, 4, 5, 6]}
    request.output_ids += [7, 8]
    rows.decoded(ledger, [request], 1)
    assert said(ledger) == {2: [1, 2, 3, 4, 5, 6, 7, 8]}
    assert [entry.weight_version for entry in ledger.proven(1)] == [1]


def test_a_row_that_is_given_away_says_nothing_until_its_next_request_is_proved(ledger: Ledger) -> None:
    rows = Rows()
    for _ in range(2):
        rows.decoded(ledger, [Request("a", 1, [1, 2], [3]), Request("b", 3, [4, 5], [6])], 0)
    rows.freed(ledger, 1)
    assert said(ledger) == {3: [4, 5, 6]}
    rows.decoded(ledger, [Request("c", 1, [7, 8], [9])], 0)
    assert said(ledger) == {3: [4, 5, 6]}
    rows.decoded(ledger, [Request("c", 1, [7, 8], [9, 10])], 0)
    assert said(ledger) == {1: [7, 8, 9, 10], 3: [4, 5, 6]}
    rows.cleared(ledger)
    assert said(ledger) == {}
    rows.decoded(ledger, [Request("c", 1, [7, 8], [9, 10])], 0)
    assert said(ledger) == {}, "its slots may be others now"


def test_what_the_ledger_cannot_say_is_left_out(ledger: Ledger) -> None:
    rows = Rows()
    requests = [
        Request("long", 0, list(range(WIDTH)), [1]),
        Request("keyed", 1, [1, 2], [3], extra_key="lora"),
        Request("retracted", None, [1, 2], [3]),
        Request("new", 2, [1, 2]),
    ]
    for _ in range(3):
        rows.decoded(ledger, requests, 0)
    assert said(ledger) == {}
