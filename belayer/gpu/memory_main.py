"""The memory server as a process: `python -m belayer.gpu.memory_main --device cpu --socket S --owner-pid P`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from belayer.gpu.health import device_health
from belayer.gpu.memory_server import MemoryServer
from belayer.gpu.progress import HangRule
from belayer.processes import exit_with_owner


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="belayer.gpu.memory_main")
    parser.add_argument("--device", required=True, help="cpu or cuda:N")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--owner-pid", type=int, required=True)
    parser.add_argument("--hang-s", type=float, default=HangRule().base_s, help="silence of a scheduler that is a hang")
    parser.add_argument("--hang-per-token-s", type=float, default=HangRule().per_token_s)
    parser.add_argument("--update-s", type=float, default=HangRule().update_s, help="a weight update's silence")
    parser.add_argument("--ready-fd", type=int, default=-1, help="gets one line once the socket is there")
    options = parser.parse_args(argv)
    exit_with_owner(options.owner_pid)
    rule = HangRule(options.hang_s, options.hang_per_token_s, update_s=options.update_s)
    server = MemoryServer(options.device, options.socket, health=device_health(options.device), hang_rule=rule)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())

    def ready() -> None:
        if options.ready_fd >= 0:
            os.write(options.ready_fd, b"ready\n")
            os.close(options.ready_fd)

    server.serve(ready)


if __name__ == "__main__":
    main(sys.argv[1:])
