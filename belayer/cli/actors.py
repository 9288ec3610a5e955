"""`belayer actors`: the process that detects, checkpoints, recovers and tidies. Start as many as you like, anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from belayer.cli import engine_options as options
from belayer.cli.options import ArchiveUrl, Durability, Namespace, OwnerPid, Url

if TYPE_CHECKING:
    from belayer.gpu.protocol import EngineHost
    from belayer.journal.archive import Archive
    from belayer.journal.store import JournalStore
    from belayer.sandbox.protocol import SandboxHost

HELP = """Run the actors of this host: detector, checkpointer, recovery and reaper, and with --archive the archiver.

Any number of these processes may run; each may be killed at any time and another finishes its work.

Examples:

  belayer actors --url redis://journal:6379 --engine-log /var/log/engines --recordings ./recordings

  belayer actors --url redis://journal:6379 --archive s3://bucket/belayer --engine-log logs --recordings ./recordings

  belayer actors --url unix:///run/belayer/redis.sock --namespace night-run --owner-pid 4711 --metrics-port 9464

  belayer actors --engine sglang --device cuda:0 --memory-socket /run/belayer/gpu0.sock --engine-log /var/log/engines \\
      --sglang-arguments "--model-path /models/qwen3-4b --mem-fraction-static 0.85"
"""


class Fallback(enum.StrEnum):
    """What becomes of a boundary at which a process cannot be captured; see docs/decisions/0015-files-alone.md."""

    NONE = "none"
    FILES = "files"


class Boundaries(enum.StrEnum):
    """Which boundaries are captured; see docs/decisions/0006-when-to-checkpoint.md."""

    EVERY = "every-boundary"
    ADAPTIVE = "adaptive"


def actors(
    engine_log: options.EngineLog,
    url: Url = None,
    namespace: Namespace = "default",
    durability: Durability = "everysec",
    archive: ArchiveUrl = None,
    owner_pid: OwnerPid = None,
    run: Annotated[
        str | None, typer.Option(help="The owner's run: removed, with all it created, before we end.")
    ] = None,
    relapse_s: Annotated[
        float,
        typer.Option(help="A second death of a main within this time excludes its worker; 0 never does.", min=0.0),
    ] = 60.0,
    policy: Annotated[
        Boundaries,
        typer.Option(envvar="BELAYER_POLICY", help="Which boundaries are captured: every one, or those worth it."),
    ] = Boundaries.EVERY,
    fallback: Annotated[
        Fallback,
        typer.Option(
            envvar="BELAYER_FALLBACK",
            help="When a process cannot be captured: no checkpoint, or one of the files alone, marked as such.",
        ),
    ] = Fallback.NONE,
    engine: options.EngineOption = options.Kind.RECORDED,
    recordings: options.Recordings = None,
    tokens_per_s: options.TokensPerS = 400.0,
    sglang_python: options.SglangPython = None,
    sglang_arguments: options.SglangArguments = "",
    memory_socket: options.MemorySocket = None,
    device: options.Device = "cpu",
    handover: options.Handover = options.When.LATE,
    adoption: options.Adopt = options.Adoption.ON,
    hang_s: options.HangS = options.DEFAULT_HANG_S,
    update_s: options.UpdateS = options.DEFAULT_UPDATE_S,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve Prometheus metrics at this port.", min=1, max=65535)
    ] = None,
    metrics_address: Annotated[str, typer.Option(help="The address for --metrics-port.")] = "127.0.0.1",
) -> None:
    chosen = options.Choice(
        engine,
        engine_log,
        recordings,
        tokens_per_s,
        sglang_python,
        sglang_arguments,
        memory_socket,
        device,
        handover,
        adoption,
        hang_s,
        update_s,
    )
    serving = None if metrics_port is None else (metrics_port, metrics_address)
    asyncio.run(_run(chosen, url, namespace, durability, archive, owner_pid, run, relapse_s, policy, fallback, serving))


async def _run(
    chosen: options.Choice,
    url: str | None,
    namespace: str,
    durability: str,
    archive: str | None,
    owner_pid: int | None,
    run: str | None,
    relapse_s: float,
    policy: Boundaries,
    fallback: Fallback,
    serving: tuple[int, str] | None,
) -> None:
    from belayer.journal.connect import open_store
    from belayer.sandbox.docker_host import open_host

    opened = None
    if archive:
        from belayer.journal.archive import open_archive

        opened = open_archive(archive, namespace)
    owner = os.getpid() if owner_pid is None else owner_pid
    engines = chosen.host(owner)
    async with open_host(or_files_only=fallback is Fallback.FILES) as sandboxes:
        store = await open_store(url, durability=durability, namespace=namespace)
        try:
            with contextlib.ExitStack() as stack:
                if serving is not None:
                    from belayer.observe.metrics import served

                    metrics = stack.enter_context(served(*serving))
                    metrics.waiting(lambda: store.waiting_bytes)
                    watching = asyncio.create_task(metrics.watch_groups(store.groups))
                    stack.callback(watching.cancel)
                await _work(store, sandboxes, engines, owner, run, chosen.patience_s, relapse_s, opened, policy)
        finally:
            await store.close()


async def _work(
    store: JournalStore,
    sandboxes: SandboxHost,
    engines: EngineHost,
    owner: int,
    run: str | None,
    engine_patience_s: float,
    relapse_s: float,
    archive: Archive | None,
    policy: Boundaries,
) -> None:
    """Run the actors until SIGTERM or SIGINT, or until the owner has ended; then tidy up after him."""
    from belayer.actors.reaper import Reaper
    from belayer.actors.service import run_actors
    from belayer.errors import JournalUnavailableError
    from belayer.processes import host_name, start_ticks, wait_exit

    ready = asyncio.Event()
    acting = run_actors(
        store,
        sandboxes,
        engines,
        host_name(),
        ready,
        engine_patience_s=engine_patience_s,
        relapse_s=relapse_s,
        archive=archive,
        policy="adaptive" if policy is Boundaries.ADAPTIVE else "every-boundary",
    )
    working = asyncio.create_task(acting)
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
            with contextlib.suppress(JournalUnavailableError):  # the owner's server may have ended with him
                await Reaper(store, sandboxes, engines, host_name(), f"actors/{os.getpid()}").remove_run(run)
    finally:
        for task in (working, orphaned, stopping):
            task.cancel()
        await asyncio.gather(working, orphaned, stopping, return_exceptions=True)
