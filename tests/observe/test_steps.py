"""Steps are told to whoever watches, and to nobody else; metrics, spans and log lines say what really happened."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from belayer import ids
from belayer.client import Trajectory
from belayer.errors import FencedError, InputError
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.events import RecoveryStarted, Rewound, TrajectoryResumed
from belayer.journal.groups import Group
from belayer.journal.memory_store import MemoryStore
from belayer.journal.redis_store import RedisStore
from belayer.journal.writer import take_over
from belayer.observe import steps
from belayer.observe.metrics import Metrics, served
from belayer.observe.position import add_position
from belayer.observe.steps import STEPS, observing
from belayer.observe.tracing import Tracing
from tests.journal.faults import generation, two_stores, written
from tests.ports import free_port
from tests.waiting import DEADLINE_S

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "belayer.json"


async def rollout(store: MemoryStore | RedisStore) -> None:
    """A little of everything that a rollout does: three appends, and an open of each kind."""
    trajectory = await Trajectory.open(store, "t")
    await trajectory.start("run", "task", [1, 2])
    await trajectory.begin_generation("w", "w-1")
    await trajectory.append_tokens([10, 11], [-0.5, -1.0])
    await trajectory.finish_generation("stop")


def steps_taken(registry: CollectorRegistry) -> dict[str, int]:
    counted = {step: registry.get_sample_value("belayer_step_seconds_count", {"step": step}) for step in STEPS}
    return {step: int(count) for step, count in counted.items() if count}


async def test_metrics_count_every_step() -> None:
    registry = CollectorRegistry()
    with observing(Metrics(registry)):
        await rollout(MemoryStore())
    await rollout(MemoryStore())
    assert steps_taken(registry) == {"open": 1, "fold": 1, "append": 3}
    assert steps.observers == ()


async def test_a_step_that_fails_is_counted_as_such() -> None:
    registry, store = CollectorRegistry(), MemoryStore()
    with observing(Metrics(registry)):
        trajectory = await Trajectory.open(store, "t")
        await take_over(store, ids.trajectory("t"), "another")
        with pytest.raises(FencedError):
            await trajectory.start("run", "task", [1])
    failed = {"step": "append", "error": "FencedError"}
    assert registry.get_sample_value("belayer_step_failures_total", failed) == 1
    assert steps_taken(registry)["append"] == 1


async def test_an_append_that_is_settled_later_is_counted_too(tmp_path: Path) -> None:
    """It was stored, and the metrics knew only of the failure."""
    async with (
        EmbeddedServer(tmp_path / "r") as server,
        two_stores(tmp_path, server) as (proxy, store, _),
    ):
        registry = CollectorRegistry()
        with observing(Metrics(registry)):
            writer = await written(store, count=0)
            proxy.hold(b"XADD")
            appending = asyncio.create_task(writer.append(generation(1)))
            await proxy.held.wait()
            appending.cancel()
            await asyncio.wait([appending])
            proxy.release()
            assert await writer.retry() == 2
    assert steps_taken(registry)["append"] == 2
    failed = {"step": "append", "error": "CancelledError"}
    assert registry.get_sample_value("belayer_step_failures_total", failed) == 1


def test_a_group_is_never_away_while_the_figures_change() -> None:
    """A look in between showed no groups at all; an alarm for a missing one rings then."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    seen: list[float | None] = []

    class Looked(list[Group]):
        def __iter__(self) -> Iterator[Group]:
            seen.append(registry.get_sample_value("belayer_group_lag", {"group": "a", "shard": "0"}))
            return super().__iter__()

    metrics.show_groups([Group("a", 0, 1, 0, 5), Group("gone", 0, 1, 0, 5)])
    metrics.show_groups(Looked([Group("a", 0, 1, 0, 7)]))
    assert seen and set(seen) == {5.0}
    assert registry.get_sample_value("belayer_group_lag", {"group": "a", "shard": "0"}) == 7
    assert registry.get_sample_value("belayer_group_lag", {"group": "gone", "shard": "0"}) is None


def test_what_is_counted_is_in_the_metrics_and_on_the_span() -> None:
    registry, exporter, provider = CollectorRegistry(), InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with observing(Metrics(registry)), observing(Tracing(provider)):
        for size_bytes in (1000, 24):
            with steps.step("checkpoint"):
                steps.count("checkpoint.stored_bytes", size_bytes)
    assert registry.get_sample_value("belayer_checkpoint_stored_bytes_total") == 1024
    assert registry.get_sample_value("belayer_checkpoint_captured_bytes_total") == 0
    said = [dict(span.attributes or {})["belayer.checkpoint.stored_bytes"] for span in exporter.get_finished_spans()]
    assert said == [1000, 24]


async def test_spans_say_of_what_and_are_nested() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with observing(Tracing(provider)), pytest.raises(ZeroDivisionError), steps.step("checkpoint", stream="sandbox/t"):
        await rollout(MemoryStore())
        raise ZeroDivisionError
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"belayer.open", "belayer.fold", "belayer.append", "belayer.checkpoint"}
    assert (
        dict(spans["belayer.append"].attributes or {}).items()
        >= {
            "belayer.stream": "trajectory/t",
            "belayer.epoch": 1,
            "belayer.sequence": 5,
        }.items()
    )
    opening, folding = spans["belayer.open"], spans["belayer.fold"]
    assert folding.parent is not None and opening.context is not None
    assert folding.parent.span_id == opening.context.span_id
    assert not spans["belayer.checkpoint"].status.is_ok
    assert spans["belayer.append"].status.is_unset


async def test_spans_without_an_sdk_are_dropped() -> None:
    with observing(Tracing()):
        await rollout(MemoryStore())


async def test_the_lag_of_each_group(redis_store: RedisStore) -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    async with redis_store.subscribe("recovery@here", "one") as notices:
        writer, _ = await take_over(redis_store, ids.sandbox("t"), "test")
        for _ in range(3):
            await writer.append(RecoveryStarted("i-1", "restore", "test"))
        await rollout(redis_store)
        noticed = (await redis_store.groups())[0].lag
        assert noticed > 0
        assert await notices.next(DEADLINE_S) is not None
        metrics.show_groups(await redis_store.groups())
        group = {"group": "recovery@here", "shard": "0"}
        assert registry.get_sample_value("belayer_group_lag", group) == noticed - 1
        assert registry.get_sample_value("belayer_group_pending", group) == 1
        assert registry.get_sample_value("belayer_group_consumers", group) == 1


async def test_metrics_are_served(redis_store: RedisStore) -> None:
    port = free_port()
    with served(port, "127.0.0.1") as metrics:
        metrics.waiting(lambda: redis_store.waiting_bytes)
        await rollout(redis_store)
        with pytest.raises(InputError, match="another port"), served(port, "127.0.0.1"):
            raise AssertionError
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read())
    assert b'belayer_step_seconds_count{step="append"} 3.0' in page
    assert b"belayer_waiting_bytes 0.0" in page


def test_the_dashboard_asks_only_for_what_there_is() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    there = {
        name
        for family in registry.collect()
        for suffix in ("", "_total", "_bucket", "_sum", "_count")
        for name in (family.name + suffix,)
    }
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert queries
    asked = {name for query in queries for name in re.findall(r"belayer_\w+", query)}
    assert asked <= there
    assert {family.name for family in registry.collect()} <= {
        re.sub(r"_(total|bucket|sum|count)$", "", name) for name in asked
    }
    named = {step for query in queries for step in re.findall(r'step="([^"]+)"', query)}
    assert named <= set(STEPS)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


async def test_lines_of_a_client_say_where_they_stand() -> None:
    store = MemoryStore()
    with structlog.testing.capture_logs() as lines:
        structlog.configure(processors=structlog.get_config()["processors"])
        try:
            trajectory = await Trajectory.open(store, "t")
            await trajectory.start("run", "task", [1])
            recovery, _ = await take_over(store, ids.trajectory("t"), "recovery")
            await recovery.append(RecoveryStarted("i-1", "restore", "recovery"))
            with pytest.raises(FencedError):
                await trajectory.begin_generation()
            reopened = asyncio.create_task(Trajectory.open(store, "t"))
            await recovery.append(Rewound(0, 0, "its sandbox failed"), TrajectoryResumed(0, 0, "i-2"))
            await reopened
        finally:
            structlog.reset_defaults()
    assert {"fenced off; open the trajectory again"} <= {line["event"] for line in lines}
    for line in lines:
        assert (line["trajectory"], line["stream"]) == ("t", "trajectory/t")
        assert line["epoch"] >= 1
        assert line["sequence"] >= 2


def test_a_line_may_name_its_own_place() -> None:
    assert add_position(None, "info", {"event": "x", "epoch": 7}) | {"epoch": 7} == add_position(
        None, "info", {"event": "x", "epoch": 7}
    )
