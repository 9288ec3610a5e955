"""The server of our own: it answers where it says, keeps its data, and never outlives its owner."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import textwrap
from pathlib import Path

import pytest

from belayer import processes
from belayer.errors import InputError
from belayer.journal import embedded
from belayer.journal.connect import open_store
from belayer.journal.embedded import EmbeddedServer, ServerStartError, shipped_server
from tests.command_lines import command_lines
from tests.journal.faults import command, stored, written
from tests.ports import free_port
from tests.waiting import DEADLINE_S, until, within

OWNER = textwrap.dedent(
    """
    import asyncio, sys, threading
    from belayer.journal.embedded import EmbeddedServer

    async def main():
        server = EmbeddedServer(sys.argv[1], remove_folder=sys.argv[2] == "remove")
        await server.__aenter__()
        print(server.pid, server._supervisor.pid, flush=True)

    # A thread that ends after starting the server must not take it along.
    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join()
    sys.stdin.read()
    """
)


@contextlib.asynccontextmanager
async def owner(folder: Path, then: str = "keep"):
    """A process that owns a server; its pid, the server's and the supervisor's, each with its start time."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, str(folder), then, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    server, supervisor = (int(pid) for pid in (await process.stdout.readline()).split())
    try:
        yield process, (server, processes.start_ticks(server)), (supervisor, processes.start_ticks(supervisor))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_the_server_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    async with owner(tmp_path / "r") as (process, server, supervisor):
        assert processes.is_alive(*server)
        process.kill()
        await within(processes.wait_exit(*server))
        await within(processes.wait_exit(*supervisor))
        assert (tmp_path / "r" / "appendonlydir").is_dir()


async def test_a_temporary_folder_goes_with_its_owner(tmp_path: Path) -> None:
    async with owner(tmp_path / "r", "remove") as (process, server, supervisor):
        process.kill()
        await within(processes.wait_exit(*supervisor))
        await within(processes.wait_exit(*server))
        assert not (tmp_path / "r").exists()


async def test_the_server_ends_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    async with owner(tmp_path / "r") as (_, server, supervisor):
        os.kill(supervisor[0], signal.SIGKILL)
        await within(processes.wait_exit(*server))


async def test_ctrl_c_in_the_terminal_does_not_reach_the_server(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "r") as server:
        assert os.getsid(server.pid) != os.getsid(0)


@pytest.mark.parametrize("executable", [None, shipped_server()])
async def test_what_was_written_is_there_after_kill_and_restart(tmp_path: Path, executable: Path | None) -> None:
    settings = {"appendfsync": "always"}
    async with EmbeddedServer(tmp_path / "r", executable=executable, settings=settings) as server:
        store = await open_store(server.url, timeout_s=DEADLINE_S)
        await written(store)
        first = server.pid
        await server.kill()
        assert server.pid == 0
        await server.restart()
        await server.restart()
        assert server.pid not in (0, first)
        assert len(await stored(store)) == 4
        await store.close()
    async with EmbeddedServer(tmp_path / "r", executable=executable) as server:
        store = await open_store(server.url, timeout_s=DEADLINE_S)
        assert len(await stored(store)) == 4
        await store.close()


async def test_only_its_user_can_open_the_socket_and_there_is_no_port(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "r") as server:
        assert server.socket.stat().st_mode & 0o777 == 0o600
        assert server.folder.stat().st_mode & 0o777 == 0o700
        assert await command(server.url, "CONFIG", "GET", "port") == [b"port", b"0"]


async def test_a_start_that_is_given_up_leaves_no_server(tmp_path: Path) -> None:
    for turns in range(1, 40, 3):
        server = EmbeddedServer(tmp_path / "r")
        starting = asyncio.create_task(server.__aenter__())
        for _ in range(turns):
            await asyncio.wait([starting], timeout=0)
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
            await server.stop()
        await until(lambda: not any(str(tmp_path) in " ".join(words) for _, words in command_lines()), what="its end")


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerStartError, match=f"port {port} is in use"):
            await EmbeddedServer(tmp_path / "r", port=port).__aenter__()


async def test_a_server_that_ends_at_once_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "r" / "appendonlydir").mkdir(parents=True)
    (tmp_path / "r" / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(ServerStartError, match="AOF manifest"):
        await EmbeddedServer(tmp_path / "r").__aenter__()


def test_no_server_anywhere_says_what_to_install() -> None:
    with pytest.raises(ServerStartError, match="apt-get install redis-server"):
        embedded.chosen_server(None, None)


def test_the_shipped_server_is_used_when_path_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert embedded.chosen_server("/usr/bin/redis-server", Path("/shipped")) == Path("/usr/bin/redis-server")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert embedded.find_server() == shipped_server()


async def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServerStartError, match="not writable"):
        await EmbeddedServer(tmp_path / "file" / "r").__aenter__()


async def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="choose a folder with a shorter path"):
        await EmbeddedServer(tmp_path / ("x" * 100)).__aenter__()


async def test_a_new_replica_that_writes_its_first_file_stops_soon(tmp_path: Path) -> None:
    """The server then refuses to stop, and forgets that it was asked to."""
    settings = {"repl-diskless-sync-delay": "0", "shutdown-timeout": "0"}
    primary = EmbeddedServer(tmp_path / "p", port=free_port(), settings=settings)
    replica = EmbeddedServer(tmp_path / "r", port=free_port(), settings=settings)
    async with primary, replica:
        for number in range(20):
            await command(primary.url, "SET", f"key-{number}", "x" * 200_000)
        await command(replica.url, "REPLICAOF", "127.0.0.1", str(primary.port))
        await until(lambda: b"Finished with success" in replica.log.read_bytes(), what="the replica")
        async with asyncio.timeout(DEADLINE_S):
            await replica.stop()
    assert b"bye bye" in replica.log.read_bytes()
