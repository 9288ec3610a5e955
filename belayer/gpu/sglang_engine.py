"""An SGLang server as one process that can be watched, proved dead and ended whole.

    python -m belayer.gpu.sglang_engine --incarnation A --role main --memory-socket S --owner-pid P --ready-fd N
        -- SGLANG-ARGUMENTS

Invariant: this process and its scheduler live and die together, within milliseconds. Its children end with its main
thread (parent_bell.py); the other way round, this process watches its children by pidfd and ends itself, without
SGLang's crash dumps, as soon as one is gone. So the pid of this process stands for the engine.
It also ends with its owner, the run's main process. It answers no request that is meant for another incarnation.
"""

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import threading

from belayer.gpu import parent_bell
from belayer.gpu.errors import UnsupportedEngineError
from belayer.gpu.incarnation import OnlyForThis
from belayer.processes import exit_with_owner

_PARENT = "BELAYER_ENGINE_PROCESS"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="belayer.gpu.sglang_engine")
    parser.add_argument("--incarnation", required=True)
    parser.add_argument("--role", choices=("main", "shadow"), required=True)
    parser.add_argument("--memory-socket", default="", help="empty: plain SGLang, without Belayer's arena")
    parser.add_argument("--owner-pid", type=int, required=True)
    parser.add_argument("--ready-fd", type=int, required=True, help="gets one JSON line once the server answers")
    parser.add_argument("sglang", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    exit_with_owner(options.owner_pid)
    os.environ[_PARENT] = parent_bell.offer()
    arguments = options.sglang[1:] if options.sglang[:1] == ["--"] else options.sglang
    if options.memory_socket:
        os.environ["BELAYER_MEMORY_SOCKET"] = options.memory_socket
    os.environ["BELAYER_INCARNATION"] = options.incarnation
    os.environ["BELAYER_ROLE"] = options.role
    os.environ.setdefault("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "0")
    os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")
    _serve(arguments, options.incarnation, options.ready_fd)


def _serve(arguments: list[str], incarnation: str, ready_fd: int) -> None:
    from sglang.srt.entrypoints.http_server import app, launch_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args = prepare_server_args(arguments)

    if server_args.tokenizer_worker_num > 1:  # each of these processes would have an app of its own
        raise UnsupportedEngineError("tokenizer-worker-num", str(server_args.tokenizer_worker_num), "1")
    app.add_middleware(OnlyForThis, incarnation=incarnation)

    def ready() -> None:
        _end_with_children()
        line = {"address": f"http://{server_args.host}:{server_args.port}", "incarnation": incarnation}
        os.write(ready_fd, json.dumps(line).encode() + b"\n")
        os.close(ready_fd)

    try:
        launch_server(server_args, launch_callback=ready)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _end_with_children() -> None:
    """From now on, end this process at once when one of its children (schedulers, detokenizer) has ended."""
    import multiprocessing

    poll = select.poll()
    for child in multiprocessing.active_children():
        if child.pid is not None:
            poll.register(os.pidfd_open(child.pid), select.POLLIN)

    def watch() -> None:
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="children-watch", daemon=True).start()


if __name__ == "__mp_main__":
    # A process that SGLang spawns runs this first of all. SGLang's own tie to the parent is made seconds later, after
    # torch is loaded: a parent that dies before would leave its schedulers behind for ever.
    parent_bell.end_with(os.environ[_PARENT])

if __name__ == "__main__":
    main(sys.argv[1:])
