"""What a container's processes are like, as the host sees them: taken while they are frozen, compared before they run.

A restore is stopped when CRIU has put everything in place and no process has run yet; what is then found must equal
what was found in the freeze, or the restore is given up. Compared are: the process tree (ids as the container sees
them, groups, sessions, threads, zombies), credentials and signal masks, command line, environment, working directory,
open files (path or kind, flags, position), the map of the memory, and a sample of its pages (at most `PAGES` a process,
out of private memory; none when pages come later than their processes). A page that is not in the sample is covered by
the digests of CRIU's images alone. Processes are read for `BUDGET_S` of processor time; of those that come later only
the ids are known.

Sampled pages avoid both ends of a mapping, where glibc keeps its threads' control blocks: in them the kernel itself
notes the processor that a thread runs on (rseq(2)).
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from belayer.sandbox.text import rows_of, shown
from belayer.sandbox.tree import status_of

BUDGET_S = 0.006
PAGES = 32
PAGE_BYTES = 4096
EDGE_BYTES = 2 * PAGE_BYTES
LEAST_BYTES = 16 * PAGE_BYTES
LARGE_FILE = 0o100000
"""Where addresses have 64 bits it means nothing; open(2), which CRIU uses, always sets it, and ioctl_tty(2) does not
for a terminal's other end."""
FILES = 512
"""Of so many of a process's open files is looked at each; the rest are counted."""
CREDENTIALS = ("Uid", "Gid", "Groups", "SigBlk", "SigIgn", "SigCgt", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")

Facts = dict[str, str]
"""What is known of one process: name of a fact -> value."""


class Probe(msgspec.Struct, frozen=True):
    """All processes of a container at one instant."""

    processes: dict[int, Facts]
    """By the process id that the container sees."""
    unusual: dict[int, dict[str, str]] = {}
    """What `attributes.unusual` says: CRIU does not keep it."""

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Probe:
        """msgspec.MsgspecError when it is not one."""
        return msgspec.json.decode(data, type=cls)


def take(pids: Iterable[int], budget_s: float = BUDGET_S) -> Probe:
    """Look at the processes (host pids), which must not move meanwhile. Details within the budget."""
    deadline = time.thread_time() + budget_s
    statuses = {pid: status for pid in pids if (status := status_of(pid))}
    inside = {pid: int(status["NSpid"].split()[-1]) for pid, status in statuses.items()}
    found = {pid: _ids(status, inside) for pid, status in statuses.items()}
    for pid in sorted(found, key=lambda pid: inside[pid]):
        if time.thread_time() > deadline:
            break
        if found[pid]["state"] != "zombie":
            _look_closer(pid, statuses[pid], found[pid])
    return Probe({inside[pid]: facts for pid, facts in found.items()})


def difference(expected: Probe, pids: Iterable[int], memory: bool) -> tuple[str, str, str] | None:
    """The first fact that is another than expected: its name, the expected value and the found one.

    `memory`: whether the processes' pages are there.
    """
    found = take(pids, budget_s=10.0).processes
    for pid, facts in expected.processes.items():
        if pid not in found:
            return f"process {pid}", "there", "missing"
        for fact, value in facts.items():
            if (memory or not fact.startswith("page ")) and found[pid].get(fact, "nothing") != value:
                return f"{fact} of process {pid}", value, found[pid].get(fact, "nothing")
    for pid in found:
        if pid not in expected.processes:
            return f"process {pid}", "none", found[pid].get("command", "there")
    return None


def _ids(status: dict[str, str], inside: dict[int, int]) -> Facts:
    state = "zombie" if status["State"][0] in "ZX" else "alive"
    facts = {"state": state, "parent": str(inside.get(int(status["PPid"]), 0))}
    if state == "alive":
        facts |= {"group": status["NSpgid"].split()[-1], "session": status["NSsid"].split()[-1]}
        facts["threads"] = status["Threads"]
    return facts


def _look_closer(pid: int, status: dict[str, str], facts: Facts) -> None:
    process = Path(f"/proc/{pid}")
    try:
        facts.update({name: " ".join(status[name].split()) for name in CREDENTIALS if name in status})
        facts["command"] = shown((process / "cmdline").read_bytes().replace(b"\0", b" ")[:200])
        facts["environment"] = _digest((process / "environ").read_bytes())
        facts["working directory"] = _stable(shown((process / "cwd").readlink()))
        facts.update(_files(process))
        areas = list(_areas(rows_of(process / "maps")))
        facts["memory map"] = _digest(repr([area[:4] for area in areas]).encode())
        facts.update(_pages(process, [(start, end) for start, end, _, _, private in areas if private]))
    except (FileNotFoundError, ProcessLookupError):
        facts["state"] = "gone"


def _files(process: Path) -> Iterator[tuple[str, str]]:
    links = sorted((process / "fd").iterdir(), key=lambda link: int(link.name))
    yield "open files", str(len(links))
    for link in links[:FILES]:
        target = _stable(shown(link.readlink()))
        if target.startswith("/"):
            info = (process / "fdinfo" / link.name).read_text().split()
            target += f" at {info[1]} with {int(info[3], 8) & ~LARGE_FILE:o}"
        yield f"file {link.name}", target


def _stable(target: str) -> str:
    """A link's target without what is another after a restore: inode numbers, and names of what is deleted."""
    if target.endswith(" (deleted)"):
        return "deleted"
    kind, colon, _ = target.partition(":[")
    return kind if colon and not target.startswith("/") else target


def _areas(maps: Iterable[bytes]) -> Iterator[tuple[int, int, str, str, bool]]:
    """Start, end, permissions, what is mapped, and whether it is private memory; neighbours of a kind as one."""
    last: tuple[int, int, str, str, bool] | None = None
    for line in maps:
        fields = line.split(None, 5)
        start, end = (int(part, 16) for part in fields[0].split(b"-"))
        permissions = fields[1].decode()
        name = shown(fields[5]) if len(fields) > 5 else ""
        anonymous = not name.startswith("/")
        kind = "" if anonymous else _stable(name)
        private = anonymous and permissions.startswith("rw") and permissions.endswith("p")
        if last is not None and last[1] == start and last[2:4] == (permissions, kind):
            last = (last[0], end, permissions, kind, private)
            continue
        if last is not None:
            yield last
        last = (start, end, permissions, kind, private)
    if last is not None:
        yield last


def _pages(process: Path, areas: list[tuple[int, int]]) -> Iterator[tuple[str, str]]:
    """Digests of pages spread evenly over the areas' insides."""
    insides = [(start + EDGE_BYTES, end - EDGE_BYTES) for start, end in areas if end - start >= LEAST_BYTES]
    pages = sum((end - start) // PAGE_BYTES for start, end in insides)
    step = -(-pages // PAGES)
    with (process / "mem").open("rb", buffering=0) as memory:
        at = 0
        for start, end in insides:
            for page in range(start + (-at % step if step else 0) * PAGE_BYTES, end, step * PAGE_BYTES):
                try:
                    yield f"page {page:x}", _digest(os.pread(memory.fileno(), PAGE_BYTES, page))
                except OSError:
                    yield f"page {page:x}", "unreadable"
            at += (end - start) // PAGE_BYTES


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
