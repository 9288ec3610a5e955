"""`belayer gateway`: an HTTP server for rollout code that stands before the engines."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from belayer.cli.engine_options import DEFAULT_UPDATE_S, UpdateS
from belayer.cli.options import ArchiveUrl, Durability, Namespace, OwnerPid, Url
from belayer.errors import InputError
from belayer.gpu.gateway.settings import Settings
from belayer.gpu.progress import HangRule

if TYPE_CHECKING:
    from belayer.gpu.gateway.text import Tokenizer

_DEFAULT = Settings()
_FILES_A_STREAM = 2
_FILES_BESIDES = 200
_COLLECT_AFTER = 50_000

HELP = """Answer rollout code in place of the engines: /generate, /v1/completions and /v1/chat/completions.

Every token is in the journal before the caller has it. When an engine dies the stream goes on on its shadow or on
another engine; when the gateway dies, ask again with the same rid and the offset that you have (header
X-Belayer-Offset). Any number of gateways may serve the same workers. SIGTERM lets running requests finish first.

Prints one line, `ready http://HOST:PORT`, once it answers. Every option can be set by BELAYER_GATEWAY_<OPTION> too.

Examples:

  belayer gateway --url redis://journal:6379 --worker engine-0 --worker engine-1 --port 8000

  belayer gateway --worker engine-0 --tokenizer /models/qwen3 --on-disconnect continue --max-streams 4000

  curl -N localhost:8000/generate -H 'X-Belayer-Trajectory: t-17' -d '{"rid": "t-17-1", "stream": true,
  "input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 512}, "return_logprob": true}'
"""


def _option(help_text: str, name: str, minimum: float | None = None) -> object:
    return typer.Option(help=help_text, envvar=f"BELAYER_GATEWAY_{name}", min=minimum)


def gateway(
    worker: Annotated[list[str], _option("A worker of the journal whose engines answer; may be repeated.", "WORKER")],
    url: Url = None,
    namespace: Namespace = "default",
    archive: ArchiveUrl = None,
    durability: Durability = "everysec",
    host: Annotated[str, _option("The address to listen at.", "HOST")] = "127.0.0.1",
    port: Annotated[int, _option("The port to listen at; 0: any that is free.", "PORT")] = 0,
    tokenizer: Annotated[
        Path | None, _option("Folder with tokenizer.json, for text, chat and stop strings.", "TOKENIZER")
    ] = None,
    model: Annotated[str, _option("What /v1/models calls the model.", "MODEL")] = _DEFAULT.model,
    run: Annotated[str, _option("The run of new trajectories; without it the workers'.", "RUN")] = _DEFAULT.run,
    max_streams: Annotated[
        int | None,
        _option(
            "Open requests; one more is answered 503. Without it 10,000, or what open files allow.", "MAX_STREAMS", 1
        ),
    ] = None,
    on_disconnect: Annotated[
        Literal["abort", "continue"], _option("What becomes of a request whose caller stays away.", "ON_DISCONNECT")
    ] = _DEFAULT.on_disconnect,
    grace_s: Annotated[
        float, _option("How long a caller may be away before its request is aborted.", "GRACE_S", 0)
    ] = _DEFAULT.grace_s,
    request_timeout_s: Annotated[
        float | None, _option("The longest that a request may take; without it there is no limit.", "REQUEST_TIMEOUT_S")
    ] = _DEFAULT.request_timeout_s,
    engine_wait_s: Annotated[
        float, _option("How long a request waits for a ready engine.", "ENGINE_WAIT_S", 0)
    ] = _DEFAULT.engine_wait_s,
    handover_wait_s: Annotated[
        float, _option("How long of that for its own engine's shadow.", "HANDOVER_WAIT_S", 0)
    ] = _DEFAULT.handover_wait_s,
    journal_wait_s: Annotated[
        float, _option("How long a request is held while the journal does not answer.", "JOURNAL_WAIT_S", 0)
    ] = _DEFAULT.journal_wait_s,
    silence_s: Annotated[
        float | None,
        _option(
            "An engine silent for so long has failed the request; without it somewhat more than --update-s.",
            "SILENCE_S",
            0.1,
        ),
    ] = None,
    update_s: UpdateS = DEFAULT_UPDATE_S,
    lag_tokens: Annotated[
        int, _option("Tokens that a caller may be behind before its engine is not read on.", "LAG_TOKENS", 1)
    ] = _DEFAULT.lag_tokens,
    appends_per_s: Annotated[
        int, _option("Journal appends that all streams together aim at.", "APPENDS_PER_S", 1)
    ] = _DEFAULT.appends_per_s,
    adopts_kv: Annotated[
        bool, _option("The engines run Belayer's plugin: resume in the adopted KV cache.", "ADOPTS_KV")
    ] = _DEFAULT.adopts_kv,
    drain_s: Annotated[
        float, _option("How long running requests may finish after SIGTERM.", "DRAIN_S", 0)
    ] = _DEFAULT.drain_s,
    owner_pid: OwnerPid = None,
) -> None:
    if owner_pid is not None:
        from belayer.processes import exit_with_owner

        exit_with_owner(owner_pid)
    settings = Settings(
        max_streams=_possible(max_streams),
        on_disconnect=on_disconnect,
        grace_s=grace_s,
        request_timeout_s=request_timeout_s,
        engine_wait_s=engine_wait_s,
        handover_wait_s=handover_wait_s,
        journal_wait_s=journal_wait_s,
        silence_s=HangRule(update_s=update_s).callers_s if silence_s is None else silence_s,
        lag_tokens=lag_tokens,
        appends_per_s=appends_per_s,
        adopts_kv=adopts_kv,
        drain_s=drain_s,
        run=run,
        model=model,
    )
    import gc

    from belayer.blocking import new_event_loop

    # Ten thousand streams are millions of objects that stay: looking through them for garbage as often as Python does
    # by itself would cost more than the streams.
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 50, 50)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_run(worker, url, namespace, archive, durability, host, port, _loaded(tokenizer), settings))


def _loaded(folder: Path | None) -> Tokenizer | None:
    from belayer.gpu.gateway.text import Tokenizer

    if folder is None:
        return None
    loaded = Tokenizer(folder)
    loaded.check()
    return loaded


def _possible(wanted: int | None) -> int:
    """How many streams there may be, once this process may open so many sockets. InputError: not as many as wanted."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = (hard - _FILES_BESIDES) // _FILES_A_STREAM if hard != resource.RLIM_INFINITY else sys.maxsize
    if wanted is not None and wanted > most:
        raise InputError(
            f"--max-streams {wanted} needs {_FILES_A_STREAM * wanted + _FILES_BESIDES} open files and this process "
            f"may have {hard}: raise the limit (ulimit -n), or give --max-streams {most}"
        )
    streams = min(_DEFAULT.max_streams, most) if wanted is None else wanted
    needed = _FILES_A_STREAM * streams + _FILES_BESIDES
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return streams


async def _run(
    workers: list[str],
    url: str | None,
    namespace: str,
    archive: str | None,
    durability: str,
    host: str,
    port: int,
    tokenizer: Tokenizer | None,
    settings: Settings,
) -> None:
    from belayer.actors.reports import report_engine_failure
    from belayer.gpu.gateway.server import serving
    from belayer.journal.connect import open_store, with_archive

    if not url:
        raise InputError("no journal is named; give --url, BELAYER_JOURNAL_URL or journal_url in belayer.toml")
    store = await with_archive(await open_store(url, durability=durability, namespace=namespace), archive, namespace)

    async def report(worker: str, incarnation: str, kind: Literal["died", "unreachable"], evidence: str) -> None:
        await report_engine_failure(store, worker, incarnation, kind, evidence, "gateway")

    try:
        async with serving(store, workers, report, settings, tokenizer, host, port) as served:
            sys.stdout.write(f"ready {served.address}\n")
            sys.stdout.flush()
            await served.until_stopped()
    finally:
        await store.close()
