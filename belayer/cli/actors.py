"""`belayer actors`: the process that detects, checkpoints, recovers and tidies. Start as many as you like, anywhere."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from belayer.gpu.protocol import EngineHost
    from belayer.journal.store import JournalStore
    from belayer.sandbox.protocol import SandboxHost

HELP = """Run the actors of this host: detector, checkpointer, recovery and reaper.

Any number of these processes may run; each may be killed at any time and another finishes its work.

Examples:

  belayer actors --url redis://journal:6379 --engine-log /var/log/engines --recordings ./recordings

  belayer actors --url unix:///run/belayer/redis.sock --namespace night-run --owner-pid 4711
"""


def actors(
    recordings: Annotated[
        Path, typer.Option(help="Folder of the recorded engine's token recordings.", exists=True, file_okay=False)
    ],
    engine_log: Annotated[Path, typer.Option(help="Folder for the engines' logs.")],
    url: Annotated[
        str | None, typer.Option(envvar="BELAYER_JOURNAL_URL", help="The journal: redis://, rediss:// or unix://.")
    ] = None,
    namespace: Annotated[str, typer.Option(envvar="BELAYER_NAMESPACE", help="Whose keys on the server.")] = "default",
    durability: Annotated[
        str, typer.Option(envvar="BELAYER_DURABILITY", help="memory, everysec, fsync or replicated.")
    ] = "everysec",
    owner_pid: Annotated[
        int | None,
        typer.Option(envvar="BELAYER_OWNER_PID", help="End when this process has ended. The engines end with it too."),
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="The owner's run: removed, with all it created, before we end.")
    ] = None,
    tokens_per_s: Annotated[float, typer.Option(help="How fast the recorded engine generates.", min=0.1)] = 400.0,
) -> None:
    import structlog

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for `ready` alone
    asyncio.run(_run(recordings, engine_log, url, namespace, durability, owner_pid, run, tokens_per_s))


async def _run(
    recordings: Path,
    engine_log: Path,
    url: str | None,
    namespace: str,
    durability: str,
    owner_pid: int | None,
    run: str | None,
    tokens_per_s: float,
) -> None:
    from belayer.gpu.recorded_host import RecordedEngineHost
    from belayer.journal.connect import open_store
    from belayer.sandbox.docker_host import open_host

    owner = os.getpid() if owner_pid is None else owner_pid
    engines = RecordedEngineHost(recordings, engine_log, owner_pid=owner, tokens_per_s=tokens_per_s)
    async with open_host() as sandboxes:
        store = await open_store(url, durability=durability, namespace=namespace)
        try:
            await _work(store, sandboxes, engines, owner, run)
        finally:
            await store.close()


async def _work(store: JournalStore, sandboxes: SandboxHost, engines: EngineHost, owner: int, run: str | None) -> None:
    """Run the actors until SIGTERM or SIGINT, or until the owner has ended; then tidy up after him."""
    from belayer.actors.reaper import Reaper
    from belayer.actors.service import run_actors
    from belayer.processes import host_name, start_ticks, wait_exit

    ready = asyncio.Event()
    working = asyncio.create_task(run_actors(store, sandboxes, engines, host_name(), ready))
    orphaned = asyncio.create_task(wait_exit(owner, start_ticks(owner)))
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    stopping = asyncio.create_task(stopped.wait())
    try:
        await ready.wait()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.wait([working, orphaned, stopping], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        if orphaned.done() and run is not None:
            working.cancel()
            await Reaper(store, sandboxes, engines, host_name(), f"actors/{os.getpid()}").remove_run(run)
    finally:
        for task in (working, orphaned, stopping):
            task.cancel()
        await asyncio.gather(working, orphaned, stopping, return_exceptions=True)
