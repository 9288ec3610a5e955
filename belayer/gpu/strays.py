"""Engine processes that whoever started them did not live to put into the journal: nobody would ever end them before
their owner has ended, and they hold memory.

Each engine says in its environment who started it. One whose starter is dead is in the journal by then, or will never
be: so look here first and into the journal after that.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from belayer.gpu.protocol import EngineProcess
from belayer.processes import host_name, is_alive, start_ticks

STARTER = "BELAYER_STARTED_BY"


def started_by_us() -> dict[str, str]:
    """The variable for the environment of an engine that this process starts."""
    return {STARTER: f"{os.getpid()} {start_ticks(os.getpid())}"}


def find_strays(worker: str, owner_pid: int) -> list[EngineProcess]:
    """Engines here of that worker and owner whose starter is dead, in the journal or not. Reads /proc; blocks."""
    found: list[EngineProcess] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with suppress(OSError, ValueError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            incarnation = _option(words, "--incarnation")
            ours = re.fullmatch(rf"{re.escape(worker)}-\w+", incarnation) and _option(words, "--owner-pid")
            if ours == str(owner_pid) and _is_orphan(folder):
                pid = int(folder.name)
                found.append(EngineProcess(incarnation, host_name(), pid, start_ticks(pid), ""))
    return [engine for engine in found if engine.pid_start_ticks]


def _option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1] if name in words[:-1] else ""


def _is_orphan(folder: Path) -> bool:
    """Whether it says who started it, and that process is gone."""
    prefix = f"{STARTER}=".encode()
    for variable in (folder / "environ").read_bytes().split(b"\0"):
        if variable.startswith(prefix):
            pid, ticks = map(int, variable.removeprefix(prefix).split())
            return not is_alive(pid, ticks)
    return False
