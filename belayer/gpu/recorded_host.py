"""Starts, finds and ends recorded engines on this machine.

Invariant: an engine that `start` returned answers; one that it did not return is not running. Engines are in a
session of their own and belong to the run's owner: whoever started one may die and the engine goes on, but never
longer than the owner.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Literal

import aiohttp

from belayer.errors import EngineFailedError
from belayer.gpu.http_engine import HttpEngine
from belayer.gpu.protocol import EngineFailure, EngineProcess, Handover
from belayer.gpu.strays import find_strays, started_by_us
from belayer.processes import host_name, kill, start_ticks, wait_exit

_LOG_TAIL_BYTES = 400


class RecordedEngineHost:
    """An EngineHost. `recordings`: folder of token recordings; `folder`: where the engines' logs go.

    `hold`: the file with which to hold all of them; see `belayer.gpu.recorded_engine`.
    """

    def __init__(
        self,
        recordings: Path,
        folder: Path,
        *,
        owner_pid: int,
        tokens_per_s: float = 400.0,
        start_timeout_s: float = 120.0,
        silence_s: float = 60.0,
        hold: Path | None = None,
    ) -> None:
        self._recordings = recordings
        self._folder = folder
        self._owner_pid = owner_pid
        self._tokens_per_s = tokens_per_s
        self._start_timeout_s = start_timeout_s
        self._silence_s = silence_s
        self._hold = hold
        self._children: list[subprocess.Popen[bytes]] = []

    async def start(self, incarnation: str, role: Literal["main", "shadow"]) -> EngineProcess:
        """Start an engine process and return once it answers. EngineFailedError when it does not in time."""
        self._folder.mkdir(parents=True, exist_ok=True)
        log = self._folder / f"{incarnation}.log"
        command = [sys.executable, "-m", "belayer.gpu.recorded_engine", "--recordings", str(self._recordings)]
        command += ["--owner-pid", str(self._owner_pid), "--incarnation", incarnation]
        command += ["--tokens-per-s", str(self._tokens_per_s), *(["--standby"] if role == "shadow" else [])]
        command += [] if self._hold is None else ["--hold", str(self._hold)]
        self._reap()
        process = _spawn(command, log)
        self._children.append(process)
        ticks = start_ticks(process.pid)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._start_timeout_s):
                said = await asyncio.to_thread(process.stdout.readline)
            address = str(json.loads(said)["address"])
        except (TimeoutError, ValueError, KeyError):
            await kill(process.pid, ticks)
            tail = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
            raise EngineFailedError(incarnation, f"did not start ({tail or 'it said nothing'}); see {log}") from None
        except BaseException:
            process.kill()
            raise
        finally:
            process.stdout.close()
        return EngineProcess(incarnation, host_name(), process.pid, ticks, address)

    async def promote(self, shadow: EngineProcess, old: EngineProcess | None = None) -> Handover:
        """Make the standby the main, once the old one is proved dead. Repeating it is fine."""
        began_s = time.monotonic()
        if old is not None:
            await self.kill(old)
        proved_s = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=self._silence_s)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                async with session.get(f"{shadow.address}/health") as response:
                    answer = await response.json()
                if answer["incarnation"] != shadow.incarnation:
                    raise EngineFailedError(shadow.incarnation, f"{answer['incarnation']} answers at {shadow.address}")
                async with session.post(f"{shadow.address}/promote") as response:
                    response.raise_for_status()
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError) as error:
            raise EngineFailedError(shadow.incarnation, f"cannot be promoted ({error!r})") from None
        return Handover({"prove": proved_s - began_s})

    async def watch(self, engine: EngineProcess) -> EngineFailure:
        """Return once the process has ended."""
        await wait_exit(engine.pid, engine.pid_start_ticks)
        return EngineFailure("died", f"engine process {engine.pid} ended")

    async def weight_versions(self) -> AsyncGenerator[int]:
        """A recording has no weights."""
        return
        yield

    async def until_idle(self, engine: EngineProcess, timeout_s: float) -> bool:
        """It has no state that a request would lose: always."""
        return True

    async def strays(self, worker: str) -> Sequence[EngineProcess]:
        """Engines of that worker here whose starter is dead; see `strays.py`."""
        return await asyncio.to_thread(find_strays, worker, self._owner_pid)

    async def kill(self, engine: EngineProcess) -> None:
        """SIGKILL the process and return once it is proved gone. A process that is gone already is fine."""
        await kill(engine.pid, engine.pid_start_ticks)
        self._reap()

    def connect(self, engine: EngineProcess) -> HttpEngine:
        """A client for that incarnation; close it."""
        return HttpEngine(engine, silence_s=self._silence_s)

    def _reap(self) -> None:
        self._children = [child for child in self._children if child.poll() is None]


def _spawn(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as log_file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log_file,
            env=os.environ | started_by_us(),
            start_new_session=True,
        )
