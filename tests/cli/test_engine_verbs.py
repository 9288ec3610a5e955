"""`belayer memory`, `shadow`, `publish` as a person uses them; what `belayer actors` says of engines it cannot run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from belayer import ids
from belayer.actors.worker_recovery import WorkerRecovery, look, process_of
from belayer.gpu.recorded_host import RecordedEngineHost
from belayer.gpu.recorded_prefix import ASSISTANT, END, USER, TokenRecording
from belayer.journal.connect import open_store
from belayer.journal.events import RunStarted, WeightsPublished, WorkerReady, WorkerRegistered
from belayer.journal.writer import Reader, take_over
from belayer.processes import host_name, is_alive, start_ticks
from tests.cli.command import COMMAND, assert_one_line_error, belayer, environment
from tests.waiting import DEADLINE_S, until


def test_a_memory_server_is_started_asked_and_ended(tmp_path: Path) -> None:
    socket = str(tmp_path / "run" / "memory.sock")
    assert_one_line_error(belayer("memory", "status", "--socket", socket), "no answer from the memory server", socket)
    command = [*COMMAND, "memory", "start", "--socket", socket, "--owner-pid", str(os.getpid())]
    server = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        done = belayer("memory", "status", "--json", BELAYER_MEMORY_SOCKET=socket)
        status = json.loads(done.stdout)
        assert (done.returncode, status["good"], status["holder"], status["weights"]["state"]) == (
            0,
            True,
            "",
            "absent",
        )
        said = belayer("memory", "status", "--socket", socket).stdout
        assert "device    cpu, healthy" in said and "held by nobody" in said
        of_rank = belayer("memory", "status", "--socket", str(tmp_path / "{rank}" / "memory.sock"), "--rank", "1")
        assert_one_line_error(of_rank, "no answer from the memory server", str(tmp_path / "1" / "memory.sock"))
        second = belayer("memory", "start", "--socket", socket)
        assert_one_line_error(second, "answers at", "already")
        server.terminate()
        assert server.wait(DEADLINE_S) == 0
    finally:
        server.kill()
        server.communicate()


def test_a_socket_is_found_in_the_settings_file(tmp_path: Path) -> None:
    (tmp_path / "belayer.toml").write_text('memory_socket = "/nosuch/memory.sock"\n')
    assert_one_line_error(belayer("memory", "status", cwd=tmp_path), "/nosuch/memory.sock")
    assert_one_line_error(belayer("memory", "status"), "no socket is named")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "needs --recordings"),
        (("--engine", "sglang"), "needs --sglang-arguments"),
        (("--engine", "sglang", "--sglang-arguments", "--model-path /m"), "needs --memory-socket"),
        (("--engine", "sglang", "--sglang-arguments", "'", "--memory-socket", "/s"), "not as a shell would have it"),
        (
            ("--engine", "sglang", "--sglang-arguments", "-m", "--memory-socket", "/s", "--device", "tpu"),
            "'tpu' is not a device",
        ),
    ],
)
def test_actors_say_which_engine_option_is_missing(arguments: tuple[str, ...], said: str) -> None:
    assert_one_line_error(belayer("actors", "--engine-log", "/nosuch", *arguments), said)


async def test_published_weights_are_in_the_journal_once(redis_url: str, namespace: str) -> None:
    where = ("--url", redis_url, "--namespace", namespace)
    at = (*where, "--json")
    unknown = await asyncio.to_thread(belayer, "publish", "run", "7", *where)
    assert_one_line_error(unknown, "no worker belongs to run run")
    store = await open_store(redis_url, namespace=namespace)
    try:
        for name, version in (("w0", 7), ("w1", 6)):
            writer, _ = await take_over(store, ids.worker(name), "test")
            await writer.append(
                WorkerRegistered(name, "main", "host", 1, 1, "http://127.0.0.1:1", "run"), WorkerReady(name, version)
            )
        for version, behind in ((6, []), (7, ["w1"]), (7, ["w1"]), (8, ["w0", "w1"])):
            done = await asyncio.to_thread(belayer, "publish", "run", str(version), *at)
            said = {"run": "run", "weight_version": version, "workers": ["w0", "w1"], "behind": behind}
            assert (done.returncode, json.loads(done.stdout)) == (len(behind) == 2, said)
        history = [recorded.event for recorded in await Reader(store, ids.run("run")).catch_up()]
        published = [event.weight_version for event in history if isinstance(event, WeightsPublished)]
        assert published == [6, 7, 8]
    finally:
        await store.close()


async def test_a_shadow_is_armed_once_and_reported(redis_url: str, namespace: str, tmp_path: Path) -> None:
    recording = TokenRecording("r", [USER, 1, END, ASSISTANT], [[2, END]])
    (tmp_path / "r.recording.json").write_bytes(msgspec.json.encode(recording))
    engines = RecordedEngineHost(tmp_path, tmp_path / "log", owner_pid=os.getpid())
    store = await open_store(redis_url, namespace=namespace)
    command = ("shadow", "w", "--url", redis_url, "--namespace", namespace, "--engine-log", str(tmp_path / "log"))
    command += ("--recordings", str(tmp_path), "--json")
    done = await asyncio.to_thread(belayer, *command)
    assert (done.returncode, json.loads(done.stdout)) == (1, {"worker": "w", "shadow": None})
    writer, _ = await take_over(store, ids.run("run"), "test")
    await writer.append(RunStarted(host_name(), os.getpid(), start_ticks(os.getpid()), "everysec", "0"))
    await WorkerRecovery(store, engines, host_name(), "test").start("w", "run")
    try:
        first = json.loads((await asyncio.to_thread(belayer, *command)).stdout)
        assert first["armed_now"] and first["host_bytes"] > 5_000_000
        state = await look(store, "w")
        assert state.shadow is not None and state.shadow.registered.incarnation == first["shadow"]
        assert is_alive(state.shadow.registered.pid, state.shadow.registered.pid_start_ticks)
        second = json.loads((await asyncio.to_thread(belayer, *command)).stdout)
        assert (second["shadow"], second["armed_now"]) == (first["shadow"], False)
    finally:
        for engine in (await look(store, "w")).engines.values():
            await engines.kill(process_of(engine))
        await store.close()
    await until(lambda: not is_alive(first["pid"], state.shadow.registered.pid_start_ticks), what="its end")
