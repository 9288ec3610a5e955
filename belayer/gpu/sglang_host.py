"""Starts, warms, promotes and ends SGLang engines over one device's memory server. An EngineHost.

Invariant: an engine that `start` returned answers; a shadow that it returned is armed, that is warm, without memory
of its own behind the KV addresses, and waiting. One that it did not return is not running. Engines run in a session
of their own and end with the owner, not with whoever started them. A main that starts finds its device's memory
server up or starts it; a shadow starts only beside a main that holds that server's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp

from belayer.errors import EngineFailedError, UnguardedMainError
from belayer.gpu import wire
from belayer.gpu.errors import ArenaError, DeviceUnhealthyError, MemoryServerGoneError
from belayer.gpu.http_engine import RESUME_KEY, HttpEngine
from belayer.gpu.incarnation import meant
from belayer.gpu.last_traces import Process, gone, processes_now
from belayer.gpu.memory_process import MemoryProcess
from belayer.gpu.memory_ranks import MemoryRanks, tensor_parallel_size
from belayer.gpu.progress import HangRule
from belayer.gpu.protocol import EngineFailure, EngineProcess, Handover
from belayer.gpu.strays import find_strays, started_by_us
from belayer.processes import host_name, is_alive, kill, start_ticks, wait_exit

_LOG_TAIL_BYTES = 1500
_LAST_LINE_BYTES = 300
_PHASES = {"prove": "prove_s", "map": "map_s", "adopt": "adopt_s", "wait": "wait_s", "unlock": "unlock_s"}
"""Phases of a handover, in order, and what the memory server and the shadow call them."""
_KINDS: dict[str, Literal["died", "hung", "gpu"]] = {"dying": "died", "dead": "died", "hung": "hung", "unfit": "gpu"}
"""What the memory server's events mean for the engine."""
_LOOK_EVERY_S = 0.25
_IDLE_LOOKS = 3
"""SGLang's load is a snapshot; so often in a row it must say that nothing runs."""


class SglangHost:
    """`python`: the interpreter that has SGLang. `arguments`: SGLang's own, the same for main and shadow.

    `memory`: how to start the memory server; without it someone else sees to that one at `memory_socket`. With tensor
    parallelism there is one for each rank, with `{rank}` in the socket's path, on the devices from the first one on.
    `adopt`: take the dead engine's KV cache over. `early`: before its process is gone (see ArenaDesk).
    """

    def __init__(
        self,
        memory_socket: Path | None,
        arguments: Sequence[str],
        folder: Path,
        *,
        owner_pid: int,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = 600.0,
        promote_timeout_s: float = 30.0,
        silence_s: float = HangRule().callers_s,
        warm_prompts: Sequence[int] = (4, 64),
        warm_batch: int = 8,
        adopt: bool = True,
        early: bool = False,
        memory: MemoryProcess | None = None,
    ) -> None:
        self._memory_socket = memory.socket if memory is not None else memory_socket
        self._memory = memory
        self._arguments = list(arguments)
        self._size = tensor_parallel_size(arguments)
        self._servers = None if self._memory_socket is None else MemoryRanks(self._memory_socket, self._size)
        self._folder = folder
        self._owner_pid = owner_pid
        self._python = python
        self._environment = {**os.environ, **(environment or {})}
        self._start_timeout_s = start_timeout_s
        self._promote_timeout_s = promote_timeout_s
        self._silence_s = silence_s
        self._warm_prompts = warm_prompts
        self._warm_batch = warm_batch
        self.adopt = adopt
        self.early = early
        self.facts: dict[str, dict[str, float]] = {}
        """What each promotion or arming took, by incarnation: seconds by phase, and counts."""
        self._children: list[subprocess.Popen[bytes]] = []
        self._processes: dict[str, frozenset[Process]] = {}
        """Those of each engine, as last seen: a dead one's cannot be found any more."""

    async def start(self, incarnation: str, role: Literal["main", "shadow"]) -> EngineProcess:
        """Start an engine and return once it answers; a shadow, once it is armed."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._reap()
        await self._memory_for(incarnation, role)
        log = self._folder / f"{incarnation}.log"
        process, ready = self._spawn(incarnation, role, log)
        ticks = start_ticks(process.pid)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                said = await _first_line(ready)
                engine = EngineProcess(incarnation, host_name(), process.pid, ticks, str(json.loads(said)["address"]))
                await _accepts_connections(engine)
                await self._warm(engine)
                if self._servers is not None:
                    answer = await self._servers.ask(wire.Arm(incarnation), self._start_timeout_s)
                    self.facts[incarnation] = answer.facts
        except (TimeoutError, ValueError, KeyError, ArenaError, aiohttp.ClientError) as error:
            await kill(process.pid, ticks)
            if isinstance(error, DeviceUnhealthyError):
                raise
            tail = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
            cause = f"{error or 'it took too long'}; its log ends: {tail}"
            raise EngineFailedError(incarnation, f"did not start ({cause}); see {log}") from None
        except BaseException:
            process.kill()
            raise
        self._remember(engine)
        return engine

    def _remember(self, engine: EngineProcess) -> frozenset[Process]:
        """All processes that the engine has or had."""
        known = self._processes.get(engine.incarnation, frozenset())
        if is_alive(engine.pid, engine.pid_start_ticks):
            known |= processes_now(engine.pid)
            self._processes[engine.incarnation] = known
        return known

    async def _memory_for(self, incarnation: str, role: Literal["main", "shadow"]) -> None:
        """See to it that the memory server can serve the engine that is about to start."""
        if self._memory_socket is None:
            return
        if role == "main":
            if self._memory is not None:
                try:
                    await asyncio.gather(*(self._memory.of_rank(rank).ensure() for rank in range(self._size)))
                except ArenaError as error:
                    raise EngineFailedError(incarnation, f"did not start: {error}") from error
            return
        try:
            holders = {status.holder for status in await self.statuses()}
        except MemoryServerGoneError as error:
            raise UnguardedMainError(incarnation, f"cannot stand by: {error}") from error
        if "" in holders or len(holders) > 1:
            raise UnguardedMainError(incarnation, f"cannot stand by: no main holds {self._memory_socket}'s memory")

    async def promote(self, shadow: EngineProcess, old: EngineProcess | None = None) -> Handover:
        """Make the shadow the main: it serves on return. The memory server kills the old main if it is not dead.

        May be repeated. With several ranks a shadow that cannot be promoted is killed: some of it may hold memory.
        """
        assert self._servers is not None
        request = wire.Promote(shadow.incarnation, True, self.adopt, self.early, self._promote_timeout_s)
        try:
            answer = await self._servers.ask(request, self._promote_timeout_s + 5.0)
        except ArenaError as error:
            if self._size > 1:
                await self.kill(shadow)
            if isinstance(error, DeviceUnhealthyError):
                raise
            raise EngineFailedError(shadow.incarnation, f"cannot be promoted: {error}") from error
        self.facts[shadow.incarnation] = facts = answer.facts
        phases_s = {phase: facts[name] for phase, name in _PHASES.items() if name in facts}
        adopted = (int(facts.get("adopted_tokens", 0)), int(facts.get("adopted_requests", 0)))
        return Handover(phases_s, *adopted, int(facts[wire.WEIGHT_VERSION]))

    async def watch(self, engine: EngineProcess) -> EngineFailure:
        """Return once its scheduler or its process has ended, or it was silent for longer than its work allows.

        /health is never asked: it answers for a dead scheduler, and not in a long prefill. Without the memory server
        only the end of the process is seen.
        """
        self._remember(engine)
        ended = asyncio.ensure_future(wait_exit(engine.pid, engine.pid_start_ticks))
        told = asyncio.ensure_future(self._told_of(engine.incarnation))
        try:
            await asyncio.wait((ended, told), return_when=asyncio.FIRST_COMPLETED)
            if told.done() and (failure := told.result()) is not None:
                if failure.kind == "gpu":
                    return failure
                return EngineFailure(failure.kind, f"{failure.evidence}{self._last_words(engine)}")
            await ended
            return EngineFailure("died", f"engine process {engine.pid} ended{self._last_words(engine)}")
        finally:
            ended.cancel()
            told.cancel()
            await asyncio.gather(ended, told, return_exceptions=True)

    async def _told_of(self, incarnation: str) -> EngineFailure | None:
        """What the memory server says of the engine's failure; None when there is no such server, or no more."""
        if self._servers is None:
            return None
        try:
            async with contextlib.aclosing(self.events()) as events:
                async for event in events:
                    if event.incarnation == incarnation:
                        return EngineFailure(_KINDS[event.kind], event.evidence)
        except ArenaError:
            return None
        return None

    async def weight_versions(self) -> AsyncGenerator[int]:
        """As the memory servers say; see EngineHost."""
        if self._servers is None:
            return
        with contextlib.suppress(ArenaError):
            async with contextlib.aclosing(self._servers.weight_versions()) as versions:
                async for version in versions:
                    yield version

    def _last_words(self, engine: EngineProcess) -> str:
        """The end of the engine's log, when it says of what it died."""
        try:
            lines = (self._folder / f"{engine.incarnation}.log").read_bytes()[-1 << 16 :].decode(errors="replace")
        except OSError:
            return ""
        errors = [line for line in lines.splitlines() if _is_error(line)]
        return f"; its log: {errors[-1][:_LAST_LINE_BYTES]}" if errors else ""

    async def until_idle(self, engine: EngineProcess, timeout_s: float) -> bool:
        """True once SGLang says that nothing runs or waits on it, or it is gone; False when not within the time."""
        idle = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), _session(engine) as session:
                while idle < _IDLE_LOOKS and is_alive(engine.pid, engine.pid_start_ticks):
                    idle = idle + 1 if await _is_idle(session, engine) else 0
                    await asyncio.sleep(_LOOK_EVERY_S)
                return True
        return False

    async def strays(self, worker: str) -> Sequence[EngineProcess]:
        """Engines of that worker here whose starter is dead; see `strays.py`."""
        return await asyncio.to_thread(find_strays, worker, self._owner_pid)

    async def kill(self, engine: EngineProcess) -> None:
        """SIGKILL the engine and return once it is proved gone, its schedulers and their GPU memory too.

        A process that is gone already is fine.
        """
        processes = self._remember(engine)
        await kill(engine.pid, engine.pid_start_ticks)
        self._reap()
        await gone(engine.incarnation, processes)
        self._processes.pop(engine.incarnation, None)

    def connect(self, engine: EngineProcess) -> HttpEngine:
        """A client for that incarnation; close it."""
        return HttpEngine(engine, silence_s=self._silence_s)

    def events(self, watching: asyncio.Event | None = None) -> AsyncGenerator[wire.EngineEvent]:
        """What happens to the engines, as the memory servers see it; see MemoryRanks.events."""
        assert self._servers is not None
        return self._servers.events(watching)

    async def status(self) -> wire.Status:
        """The memory server's state; rank 0's."""
        return (await self.statuses())[0]

    async def statuses(self) -> list[wire.Status]:
        """That of each rank's."""
        assert self._servers is not None
        return await self._servers.status()

    def _spawn(self, incarnation: str, role: str, log: Path) -> tuple[subprocess.Popen[bytes], int]:
        ready_read, ready_write = os.pipe()
        command = [self._python, "-m", "belayer.gpu.sglang_engine", "--incarnation", incarnation, "--role", role]
        if self._memory_socket is not None:
            command += ["--memory-socket", str(self._memory_socket)]
        command += ["--owner-pid", str(self._owner_pid), "--ready-fd", str(ready_write), "--"]
        command += [*self._arguments, "--port", str(_free_port())]
        try:
            with log.open("ab") as log_file:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=log_file,
                    env=self._environment | started_by_us(),
                    pass_fds=[ready_write],
                    start_new_session=True,
                )
        except BaseException:
            os.close(ready_read)
            raise
        finally:
            os.close(ready_write)
        self._children.append(process)
        return process, ready_read

    async def _warm(self, engine: EngineProcess) -> None:
        """Serve a few prompts, so that kernels are compiled and caches are filled before anything is measured."""
        longest = [1 + number % 50 for number in range(max(self._warm_prompts))]
        async with _session(engine, self._start_timeout_s) as session:
            for length in self._warm_prompts:
                await _generate(session, engine, longest[:length])
            # Many at once, each one token beyond what is cached; then the same without a prefill: both are what
            # resumed streams will ask of a new main.
            prompts = [[*longest, 51 + number] for number in range(self._warm_batch)]
            await asyncio.gather(*(_generate(session, engine, prompt) for prompt in prompts))
            await asyncio.gather(*(_generate(session, engine, prompt, resuming=True) for prompt in prompts))

    def _reap(self) -> None:
        self._children = [child for child in self._children if child.poll() is None]


def _session(engine: EngineProcess, timeout_s: float = 60.0) -> aiohttp.ClientSession:
    """For requests to that engine alone, each of which may take so long."""
    return aiohttp.ClientSession(headers=meant(engine.incarnation), timeout=aiohttp.ClientTimeout(total=timeout_s))


async def _generate(
    session: aiohttp.ClientSession, engine: EngineProcess, prompt: list[int], *, resuming: bool = False
) -> None:
    sampling: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    if resuming:
        sampling["custom_params"] = {RESUME_KEY: ["", len(prompt)]}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    async with session.post(f"{engine.address}/generate", json=body) as response:
        if response.status != 200:
            raise ValueError(f"it answered {response.status} to a warm-up request")
        await response.read()


async def _is_idle(session: aiohttp.ClientSession, engine: EngineProcess) -> bool:
    try:
        async with session.get(f"{engine.address}/v1/loads", params={"include": "core"}) as response:
            loads = (await response.json())["loads"]
        return not any(load.get("num_running_reqs", 0) + load.get("num_waiting_reqs", 0) for load in loads)
    except (aiohttp.ClientError, ValueError, KeyError, TypeError):
        return False


def _is_error(line: str) -> bool:
    """A traceback's last line (`ValueError: ...`), what torch says when memory is out, or faulthandler of a signal."""
    if line.startswith("Fatal Python error: "):
        return True
    word = line.split(":", 1)[0]
    return ":" in line and word.replace(".", "").isidentifier() and word.endswith(("Error", "Exception"))


async def _first_line(fd: int) -> bytes:
    """What comes through the pipe until its end or a line's; takes the descriptor over."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb"))
    try:
        return await reader.readline()
    finally:
        transport.close()


async def _accepts_connections(engine: EngineProcess) -> None:
    """SGLang says that it is ready a moment before its server listens. The caller sets the deadline."""
    host, port = engine.address.removeprefix("http://").split(":")
    while True:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except ConnectionRefusedError:
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
