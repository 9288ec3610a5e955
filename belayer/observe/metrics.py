"""Prometheus metrics of this process. Needs `pip install 'belayer[metrics]'`.

`belayer actors --metrics-port` serves them. A program that embeds Belayer gives its own registry:

    with observing(Metrics(registry)):
        ...

No label ever names a trajectory, so the number of series does not grow with the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from belayer.errors import InputError, JournalUnavailableError
from belayer.observe.steps import COUNTS, STEPS, Ended, Fields, observing

BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120)
LAG_EVERY_S = 5.0


class Metrics:
    """An observer of steps, and gauges of what waits. All figures are this process's, but the groups' lag."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._took = Histogram(
            "belayer_step_seconds", "How long a step took.", ["step"], registry=registry, buckets=BUCKETS_S
        )
        self._failed = Counter(
            "belayer_step_failures",
            "Steps that an error ended, by the error's class.",
            ["step", "error"],
            registry=registry,
        )
        self._lag = Gauge(
            "belayer_group_lag",
            "Notices that a consumer group has not had delivered yet.",
            ["group", "shard"],
            registry=registry,
        )
        self._pending = Gauge(
            "belayer_group_pending",
            "Notices that a consumer group has taken and not finished.",
            ["group", "shard"],
            registry=registry,
        )
        self._consumers = Gauge(
            "belayer_group_consumers",
            "Consumers that a group knows, dead ones included.",
            ["group", "shard"],
            registry=registry,
        )
        self._waiting = Gauge(
            "belayer_waiting_bytes", "Bytes of events that wait in this process to be stored.", registry=registry
        )
        self._counts = {
            what: Counter(f"belayer_{what.replace('.', '_')}", meaning, registry=registry)
            for what, meaning in COUNTS.items()
        }
        self._groups: set[tuple[str, str]] = set()
        self._steps = {step: self._took.labels(step) for step in STEPS}

    def begin(self, step: str, fields: Fields) -> Ended:
        histogram = self._steps[step]

        def ended(took_s: float, error: BaseException | None) -> None:
            histogram.observe(took_s)
            if error is not None:
                self._failed.labels(step, type(error).__name__).inc()

        return ended

    def count(self, what: str, amount: float) -> None:
        self._counts[what].inc(amount)

    def waiting(self, size_bytes: Callable[[], int]) -> None:
        """Show what this function says as the bytes that wait; a store's `waiting_bytes`, say."""
        self._waiting.set_function(size_bytes)

    def show_groups(self, groups: Sequence[Any]) -> None:
        """The consumer groups as they are now (`belayer.journal.groups.Group`)."""
        shown = {(group.name, str(group.shard)) for group in groups}
        for gone in self._groups - shown:
            for gauge in (self._lag, self._pending, self._consumers):
                gauge.remove(*gone)
        self._groups = shown
        for group in groups:
            self._lag.labels(group.name, group.shard).set(group.lag)
            self._pending.labels(group.name, group.shard).set(group.pending)
            self._consumers.labels(group.name, group.shard).set(group.consumers)

    async def watch_groups(self, look: Callable[[], Awaitable[Sequence[Any]]], every_s: float = LAG_EVERY_S) -> None:
        """Show the groups again and again until cancelled; while the journal is away the last figures stay."""
        while True:
            try:
                self.show_groups(await look())
            except JournalUnavailableError:
                self._failed.labels("lag", JournalUnavailableError.__name__).inc()
            await asyncio.sleep(every_s)


@contextmanager
def served(port: int, address: str) -> Iterator[Metrics]:
    """Metrics of this process at http://address:port/metrics while the context lasts. InputError if that is taken."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        raise InputError(f"no metrics at {address}:{port}: {error.strerror or error}; choose another port") from None
    try:
        with observing(metrics):
            yield metrics
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
