"""What a checkpoint of the files alone leaves out, when a process stands in the way of a whole one (decision 15).

All memory is left out, as when the machine stops at that instant: processes, and what lives in memory for them
(/dev/shm, message queues, System V objects). Files in memory that are the trajectory's own (the spec's `tmpfs`) are
never left out, nor is a change to process 1: then there is no such checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from belayer.errors import CheckpointRefusedError
from belayer.journal.events import LeftOut
from belayer.sandbox.protocol import Incarnation
from belayer.sandbox.quiet import IPC_OBJECTS
from belayer.sandbox.tree import described, status_of

NAMED = 16
"""So many are named; the rest is counted."""
COMMAND_CHARACTERS = 100
SHARED = (IPC_OBJECTS, "/dev/shm/", "/dev/mqueue/")


@dataclass(frozen=True, slots=True)
class InTheWay:
    """A process (host pid; process 1 stands for the container) that cannot be captured, and why."""

    pid: int
    cause: str


def left_out(
    here: Incarnation, held: Iterable[int], obstacle: InTheWay, noises: Collection[str]
) -> tuple[LeftOut, ...]:
    """What is in the frozen container besides files and runner, the obstacle first. `noises`: see `quiet.py`.

    CheckpointRefusedError when one of them does not go with the processes.
    """
    for noise in noises:
        if not noise.startswith(SHARED):
            cause = f"{obstacle.cause}; its files alone would not hold: {noise}"
            raise CheckpointRefusedError(here.name, cause, described(obstacle.pid))
    found = [_process(pid, obstacle) for pid in held if pid != here.pid]
    found += [LeftOut(0, _printable(noise), "") for noise in noises]
    if found and obstacle.pid == here.pid:
        found.append(LeftOut(0, "the container", obstacle.cause))
    found.sort(key=lambda one: not one.cause)
    if len(found) > NAMED:
        found[NAMED - 1 :] = [LeftOut(0, f"{len(found) - NAMED + 1} more", "")]
    return tuple(found)


def _process(pid: int, obstacle: InTheWay) -> LeftOut:
    status = status_of(pid)
    inside = int(status["NSpid"].split()[-1]) if status else 0
    try:
        with Path(f"/proc/{pid}/cmdline").open("rb") as file:
            line = file.read(4 * COMMAND_CHARACTERS).replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        line = ""
    line = line or status.get("Name", "")  # of a zombie
    return LeftOut(inside, _printable(line), obstacle.cause if pid == obstacle.pid else "")


def _printable(text: str) -> str:
    """What a container chose to be called, safe to show and to keep."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:COMMAND_CHARACTERS])
