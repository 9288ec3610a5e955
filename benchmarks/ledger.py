"""What the ledger costs an engine's scheduler: `python -m benchmarks.ledger [--out benchmarks/results/ledger.json]`.

The plugin's own code on a ledger in a memfd, as in an engine: a decode step is begun, its tokens are said for every
request of the batch, and it is ended. CPU time of this process (process_time), without what the loop here costs, the
quickest and the median of several rounds. No engine and no GPU: the forward pass that it is added to is not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from belayer.gpu.ledger import Ledger, ledger_bytes
from belayer.gpu.plugin.rows import Rows

BATCHES = (1, 64, 256)
WIDTH = 8192
PROMPT_TOKENS = 2048
STEPS = 200
ROUNDS = 15


@dataclass
class Request:
    """As far as the plugin looks at SGLang's."""

    rid: str
    req_pool_idx: int
    origin_input_ids: list[int] = field(default_factory=lambda: list(range(PROMPT_TOKENS)))
    output_ids: list[int] = field(default_factory=lambda: [1])
    extra_key: None = None


def armed_ledger() -> Ledger:
    """As an engine has it until its end: the bell is this thread's, so it must stay mapped."""
    fd = os.memfd_create("ledger")
    os.ftruncate(fd, ledger_bytes(max(BATCHES), WIDTH))
    ledger = Ledger(fd, max(BATCHES), WIDTH)
    ledger.begin(1)
    return ledger


def measure(ledger: Ledger, batch: int) -> dict[str, float]:
    """Microseconds of CPU time of a decode step with so many requests, and of one request's first saying."""
    steps_us: list[float] = []
    first_us: list[float] = []
    for number in range(ROUNDS):
        rows, requests = Rows(), [Request(f"request-{number}-{row}", row) for row in range(batch)]
        rows.decoded(ledger, requests, 0)
        first_us.append(_cpu_us(lambda rows=rows, requests=requests: rows.decoded(ledger, requests, 0)) / batch)

        def step(rows: Rows = rows, requests: list[Request] = requests) -> None:
            for request in requests:
                request.output_ids.append(7)
            ledger.begin_step(0)
            rows.decoded(ledger, requests, 0)
            ledger.end_step(0)

        def alone(requests: list[Request] = requests) -> None:
            for request in requests:
                request.output_ids.append(7)

        with_ledger = _cpu_us(lambda step=step: _repeat(step))
        others = [Request("", row) for row in range(batch)]
        without = _cpu_us(lambda alone=alone, others=others: _repeat(lambda: alone(others)))
        steps_us.append((with_ledger - without) / STEPS)
        assert [len(entry.token_ids) for entry in ledger.proven(1)] == [PROMPT_TOKENS + 1 + STEPS] * batch
        for row in range(batch):
            rows.freed(ledger, row)
    return {
        "step_us": round(statistics.median(steps_us), 2),
        "step_quickest_us": round(min(steps_us), 2),
        "step_us_a_request": round(statistics.median(steps_us) / batch, 3),
        "first_saying_us_a_request": round(statistics.median(first_us), 1),
    }


def _repeat(step: Callable[[], None]) -> None:
    for _ in range(STEPS):
        step()


def _cpu_us(work: Callable[[], object]) -> float:
    began_s = time.process_time()
    work()
    return (time.process_time() - began_s) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.ledger", description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load, ledger = os.getloadavg()[0], armed_ledger()
    result: dict[str, Any] = {
        "machine": {"python": platform.python_version(), "cores": os.cpu_count(), "load_average": round(load, 1)},
        "prompt_tokens": PROMPT_TOKENS,
        "steps": STEPS,
        "rounds": ROUNDS,
        "batches": {str(batch): measure(ledger, batch) for batch in BATCHES},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
