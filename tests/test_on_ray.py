"""Belayer's services on a real Ray cluster of two nodes: kept running, there on a new node, gone with their cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from belayer.on_ray import PlacementError, Running, Service, place
from belayer.processes import is_alive, start_ticks
from tests.waiting import until

pytestmark = pytest.mark.sandbox
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    made.add_node(**NODE)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def actors(url: str, namespace: str, folder: Path) -> Service:
    where = ("--engine-log", str(folder), "--recordings", str(folder))
    return Service(("actors", "--url", url, "--namespace", namespace, *where))


def parent(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:")))


def lives(running: list[Running]) -> dict[int, int]:
    return {process.pid: start_ticks(process.pid) for process in running}


async def test_services_run_on_every_node_are_healed_and_end(
    cluster: Any, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    with place([actors(redis_url, namespace, tmp_path)]) as placed:
        first = placed.running()
        assert len({process.node for process in first}) == len(first) == 2
        begun = lives(first)
        assert all(is_alive(pid, ticks) for pid, ticks in begun.items())

        struck = first[0]
        os.kill(struck.pid, signal.SIGKILL)
        await until(
            lambda: any(p.node == struck.node and p.starts > 1 and p.pid != struck.pid for p in placed.running()),
            what="the killed service was started again",
        )

        kept = first[1]
        os.kill(parent(kept.pid), signal.SIGKILL)
        await until(lambda: not is_alive(kept.pid, begun[kept.pid]), what="the dead keeper's service has ended")
        await until(
            lambda: any(p.node == kept.node and p.pid != kept.pid for p in placed.running()),
            what="the node has a keeper and its service again",
        )

        third = cluster.add_node(**NODE)
        await until(lambda: len({p.node for p in placed.running()}) == 3, what="the new node has its service")
        last = begun | lives(placed.running())
        cluster.remove_node(third)
        await until(lambda: len(placed.running()) == 2, what="the lost node's service is forgotten")
    await until(lambda: not any(is_alive(pid, ticks) for pid, ticks in last.items()), what="all services have ended")


async def test_a_service_that_does_not_come_up_is_named_and_nothing_is_left(
    cluster: Any, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    good = actors(redis_url, namespace, tmp_path)
    bad = Service(("actors", "--url", "nonsense://here", "--engine-log", "{host}", "--recordings", str(tmp_path)))
    with pytest.raises(PlacementError) as failed:
        place([good, bad])
    assert len(failed.value.problems) == 2
    assert all("--url nonsense://here" in problem and "status 2" in problem for problem in failed.value.problems)
    with place([]) as placed:
        assert placed.running() == []


async def test_a_keeper_that_cannot_work_is_named(cluster: Any) -> None:
    """Its node had no services, and `place` returned as if all were well."""
    nobody = Service(("actors",), environment={"NUL": "\0"})  # no process takes that
    with pytest.raises(PlacementError, match="the keeper") as failed:
        place([nobody])
    assert len(failed.value.problems) == 2


def test_a_service_does_not_show_its_environment() -> None:
    assert "geheim" not in repr(Service(("actors",), environment={"BELAYER_JOURNAL_URL": "redis://u:geheim@h"}))
