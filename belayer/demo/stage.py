"""Everything that a demo run needs around the rollouts, started on the way in and gone on the way out.

A run has a folder of its own with the journal's server, the token recordings and the logs; two actor processes; one
worker with a main engine and a shadow. Whatever ends the run (its end, an error, Ctrl-C), each of these is ended and
removed, and one that cannot be does not keep the others. Should this process be killed, actors and engines see it and
end after it, the actors having removed the run's containers and the server's supervisor the folder.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from belayer import __version__, ids
from belayer.actors.worker_recovery import WorkerRecovery, process_of
from belayer.actors.worker_recovery import look as look_worker
from belayer.demo.chat import Chat
from belayer.demo.engines import Deadlines, EngineName, make_engines
from belayer.demo.reading import ContainerReader
from belayer.demo.waiting import wait_until
from belayer.errors import BelayerError, JournalError
from belayer.gpu.protocol import EngineHost
from belayer.journal.connect import open_store
from belayer.journal.embedded import EmbeddedServer
from belayer.journal.events import RunFinished, RunStarted
from belayer.journal.redis_store import RedisStore
from belayer.journal.writer import take_over
from belayer.processes import host_name, kill, start_ticks
from belayer.projections import worker as worker_projection
from belayer.sandbox.docker_host import open_host
from belayer.sandbox.protocol import SandboxHost

WORKER = "demo"
ACTOR_PROCESSES = 2
_READY_S = 30.0


class ActorsFailedError(BelayerError):
    """An actor process did not start."""


@dataclass(slots=True)
class Actors:
    """The actor processes of a run. `command` starts one."""

    command: list[str]
    log: Path
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    async def start_one(self) -> None:
        """Start a process and return once its actors work.

        One that ends at once is started again, as a service manager would: the journal's server may just be away.
        """
        deadline = time.monotonic() + _READY_S
        while not await self._starts(deadline - time.monotonic()):
            if time.monotonic() >= deadline:
                lines = self.log.read_text(errors="replace").strip().splitlines()
                raise ActorsFailedError(f"`belayer actors` did not start: {lines[-1] if lines else 'it said nothing'}")

    async def _starts(self, timeout_s: float) -> bool:
        """Start a process; whether its actors work."""
        process = self._spawn()
        self.processes[process.pid] = process
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                ready = await asyncio.to_thread(process.stdout.readline)
        except TimeoutError:
            ready = b""
        if ready.strip() != b"ready":
            await self.kill(process.pid)
            return False
        return True

    async def kill(self, pid: int) -> None:
        """SIGKILL one of them and return once it is gone."""
        process = self.processes.pop(pid)
        await kill(pid, start_ticks(pid))
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    async def kill_all(self) -> None:
        for pid in list(self.processes):
            await self.kill(pid)

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )


@dataclass(frozen=True, slots=True)
class Stage:
    """A run under way."""

    run: str
    folder: Path
    store: RedisStore
    server: EmbeddedServer
    sandboxes: SandboxHost
    engines: EngineHost
    actors: Actors
    deadlines: Deadlines
    reader: ContainerReader

    @property
    def recordings(self) -> Path:
        return self.folder / "recordings"


@asynccontextmanager
async def open_stage(
    *,
    tokens_per_s: float,
    keep: bool,
    actor_options: Sequence[str] = (),
    engine: EngineName = "recorded",
    chats: Sequence[Chat] = (),
) -> AsyncIterator[Stage]:
    """A stage without engines and actors: put recordings into its folder, then `begin`. SGLang needs the chats.

    HostUnfitError, ServerStartError and the like when this machine cannot run the demo.
    """
    async with AsyncExitStack() as stack:
        sandboxes = await stack.enter_async_context(open_host())
        folder = Path(tempfile.mkdtemp(prefix="belayer-demo-"))
        recordings = folder / "recordings"
        recordings.mkdir()
        server = await stack.enter_async_context(EmbeddedServer(folder, remove_folder=not keep))
        store = await open_store(server.url)
        stack.push_async_callback(store.close)
        engines = make_engines(engine, folder, recordings, chats, tokens_per_s)
        run = f"demo-{ids.new_suffix()}"
        stack.push_async_callback(sandboxes.remove_run, run)
        command = [sys.executable, "-m", "belayer.cli", "actors", *engines.options]
        command += ["--engine-log", str(folder / "engines"), "--url", server.url, "--owner-pid", str(os.getpid())]
        command += ["--run", run]
        command += ["--relapse-s", "0"]  # engines are killed on purpose here, one soon after the other
        command += actor_options
        reader = await stack.enter_async_context(ContainerReader())
        actors = Actors(command, folder / "actors.log")
        stage = Stage(run, folder, store, server, sandboxes, engines.host, actors, engines.deadlines, reader)
        stack.push_async_callback(_end_engines, stage)
        stack.push_async_callback(stage.actors.kill_all)
        yield stage


async def begin(stage: Stage) -> None:
    """Start actors and engines; returns once a main engine serves and a shadow stands by."""
    writer, _ = await take_over(stage.store, ids.run(stage.run), "demo")
    owner, ticks = os.getpid(), start_ticks(os.getpid())
    await writer.append(RunStarted(host_name(), owner, ticks, stage.store.durability, __version__))
    await asyncio.gather(*(stage.actors.start_one() for _ in range(ACTOR_PROCESSES)))
    await WorkerRecovery(stage.store, stage.engines, host_name(), "demo").start(WORKER, stage.run)
    await wait_until(
        stage.store,
        ids.worker(WORKER),
        worker_projection.fold,
        worker_projection.EMPTY,
        lambda state: state.serving is not None and state.shadow is not None,
        "a main engine and a shadow",
        stage.deadlines.ready_s,
    )


async def finish(stage: Stage) -> None:
    """Say in the journal that the run is over; the actors then remove its containers and engines."""
    writer, _ = await take_over(stage.store, ids.run(stage.run), "demo")
    await writer.append(RunFinished("the demo is over"))


async def _end_engines(stage: Stage) -> None:
    """Engines end with their owner; this is for an owner that lives on."""
    try:
        state = await look_worker(stage.store, WORKER)
    except JournalError:
        return
    for engine in state.engines.values():
        await stage.engines.kill(process_of(engine))
