"""`belayer actors` as a process: what it serves as metrics and what it says in its log."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest

from belayer import ids
from belayer.journal.events import FailureDetected, WorkerReady, WorkerRegistered
from belayer.journal.redis_store import RedisStore
from belayer.journal.writer import take_over
from belayer.processes import host_name
from tests.cli.command import COMMAND, ROOT, environment
from tests.ports import free_port
from tests.waiting import DEADLINE_S


def page(port: int) -> str:
    return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S).read().decode()


async def dead_main(store: RedisStore) -> None:
    """A worker of this host whose main is gone and has no shadow: recovery has to start another, and cannot.

    All in one step, or recovery may find the main serving and try to arm a shadow for it first.
    """
    writer, _ = await take_over(store, ids.worker("w"), "test")
    await writer.append(
        WorkerRegistered("w-1", "main", host_name(), 1 << 22, 1, "http://127.0.0.1:1", "run"),
        WorkerReady("w-1", 0),
        FailureDetected("w-1", "died", "ended", "test"),
    )


@pytest.mark.sandbox
async def test_every_line_says_where_it_stands(
    redis_store: RedisStore, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    (recordings := tmp_path / "recordings").mkdir()
    (logs := tmp_path / "engines").mkdir()
    (log := tmp_path / "log").touch()
    port = free_port()
    command = [*COMMAND, "actors", "--url", redis_url, "--namespace", namespace, "--engine-log", str(logs)]
    command += ["--recordings", str(recordings), "--metrics-port", str(port), "--owner-pid", str(os.getpid())]
    with (
        log.open("w") as stderr,
        subprocess.Popen(  # noqa: ASYNC220
            command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as actors,
    ):
        try:
            assert actors.stdout is not None
            assert await asyncio.to_thread(actors.stdout.readline) == "ready\n"
            logs.rmdir()
            logs.touch()  # so no engine can be started
            await dead_main(redis_store)
            async with asyncio.timeout(DEADLINE_S):
                while "left for the next try" not in log.read_text():
                    await redis_store.wait(ids.worker("w"), 1 << 40, 0.2)
            metrics = await asyncio.to_thread(page, port)
        finally:
            actors.send_signal(signal.SIGTERM)
            actors.wait(DEADLINE_S)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert any("Traceback" in line.get("exception", "") for line in lines), "an error that is no Belayer error"
    for line in lines:
        assert (line["trajectory"], line["stream"]) == ("w", "worker/w")
        assert line["epoch"] >= 2
        assert line["sequence"] >= 4
        assert line["timestamp"].endswith("Z")
    assert 'belayer_group_pending{group="recovery@' in metrics
    assert 'step="recovery.worker"} 1.0' in metrics


def test_a_port_that_is_taken_is_said_in_one_line(redis_url: str, namespace: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [*COMMAND, "actors", "--url", redis_url, "--namespace", namespace, "--engine-log", str(tmp_path)]
        command += ["--recordings", str(tmp_path), "--metrics-port", port]
        done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert port in done.stderr
    assert "choose another port" in done.stderr
