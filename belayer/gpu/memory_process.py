"""A device's memory server as a process of its own, started by whoever needs it first.

Invariant: at most one server has the socket: who starts one holds a lock beside it. It outlives its starter and ends
with the owner. A server that died leaves its socket behind; the next one takes the place.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from belayer.gpu import wire
from belayer.gpu.arena import device_index
from belayer.gpu.errors import ArenaError, ArenaRefusedError, MemoryServerGoneError
from belayer.gpu.memory_client import MemoryClient

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class MemoryProcess:
    """How to start one. `python` has the packages that the device needs (CUDA's bindings; the CPU needs none)."""

    device: str
    socket: Path
    owner_pid: int
    python: str = sys.executable
    log: Path | None = None
    options: Sequence[str] = ()
    """More of `belayer.gpu.memory_main`'s."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def of_rank(self, rank: int) -> MemoryProcess:
        """That of a tensor parallel rank: its own socket (`{rank}` in the path), the rank-th device from here on."""
        device = f"cuda:{device_index(self.device) + rank}" if self.device.startswith("cuda") else self.device
        return replace(self, device=device, socket=Path(str(self.socket).replace("{rank}", str(rank))))

    async def ensure(self, timeout_s: float = 60.0) -> bool:
        """Start the server unless one answers; whether one was started. ArenaError when it does not come up."""
        return await asyncio.to_thread(self._ensure, timeout_s)

    def _ensure(self, timeout_s: float) -> bool:
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.socket.with_name(f"{self.socket.name}.lock"), timeout_s):
            try:
                ask_status(self.socket)
            except ArenaError:
                self._start(timeout_s)
                return True
        return False

    def _start(self, timeout_s: float) -> None:
        ready, ready_write = os.pipe()
        command = [self.python, "-m", "belayer.gpu.memory_main", "--device", self.device]
        command += ["--socket", str(self.socket), "--owner-pid", str(self.owner_pid), "--ready-fd", str(ready_write)]
        log = self.log or Path(os.devnull)
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    [*command, *self.options],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **self.environment},
                    pass_fds=[ready_write],
                    start_new_session=True,
                )
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(ready_write)
        if _says_ready(ready, timeout_s):
            return
        process.kill()
        process.wait()
        raise ArenaRefusedError(f"the memory server of {self.device} did not start within {timeout_s:.0f} s; see {log}")


def ask_status(socket: Path, timeout_s: float = 5.0) -> wire.Status:
    """The server's state. MemoryServerGoneError when none answers there."""
    with MemoryClient.connect(socket, "status", "control", timeout_s)[0] as client:
        return client.ask(wire.AskStatus(), wire.Status)[0]


def _says_ready(fd: int, timeout_s: float) -> bool:
    with os.fdopen(fd, "rb") as ready:
        readable, _, _ = select.select([ready], [], [], timeout_s)
        return bool(readable) and ready.readline() == b"ready\n"


@contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    """The lock, which ends with the process that holds it."""
    deadline = time.monotonic() + timeout_s
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise MemoryServerGoneError(str(path), f"being started for {timeout_s:.0f} s") from None
                time.sleep(_POLL_S)
        yield
