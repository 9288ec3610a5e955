"""Processes that run before their memory is there: CRIU's lazy-pages daemon hands a page over when it is touched, and
all others in the background.

The daemon outlives the process that restored the container. Should it die with pages still missing, the kernel would
give the container zeros in their place; so whoever sees it end badly ends the container too, which is a failure that is
seen. A container whose pages are still on their way is not captured: the capture waits for them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from belayer.errors import SandboxError
from belayer.processes import is_alive, start_ticks
from belayer.sandbox.tree import kill_users_of

LAZY_BYTES = 64 << 20
"""Memory that is worth a daemon: less than this is read as fast as the daemon starts."""
LISTEN_S = 10.0
POLL_S = 0.001
SOCKET = "lazy-pages.socket"
GUARD = """
echo $$ > "$2/lazy-pid"
echo -900 > /proc/self/oom_score_adj 2>/dev/null || true
"$0" lazy-pages --images-dir "$1" --work-dir "$2" --log-file lazy-pages.log && exit 0
until read -r init < "$2/init"; do [ -d "$2" ] || exit 1; sleep 0.1; done
grep -qs "$3" "/proc/$init/cgroup" && kill -KILL "$init"
"""


class LazyPagesError(SandboxError):
    """The daemon did not start; the message says where its log is."""


def is_worth_it(sizes: Iterable[int]) -> bool:
    """Whether pages of these sizes in all, in bytes, are to come later than their processes."""
    return sum(sizes) >= LAZY_BYTES


def start(criu: Path, images: Path, work: Path, container_id: str) -> None:
    """Start a daemon that serves the images' pages to the container about to be restored, whose logs are in `work`."""
    setsid = shutil.which("setsid") or "setsid"
    command = [setsid, "--fork", "sh", "-c", GUARD, str(criu), str(images), str(work), container_id]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    deadline = time.monotonic() + LISTEN_S
    while not (work / SOCKET).exists():
        if time.monotonic() > deadline:
            kill_users_of(work)
            raise LazyPagesError(f"CRIU's lazy-pages daemon does not listen; its log is in {work}")
        time.sleep(POLL_S)


def watch_over(work: Path, init: int) -> None:
    """Tell the daemon's guard which process to end should the daemon fail."""
    new = work / "init.new"
    new.write_text(f"{init}\n")
    new.rename(work / "init")


def wait(work: Path, timeout_s: float) -> bool:
    """Whether all pages have arrived, within the time."""
    deadline = time.monotonic() + timeout_s
    while (guard := _guard(work)) is not None:
        if time.monotonic() > deadline:
            return False
        pid, ticks = guard
        while is_alive(pid, ticks) and time.monotonic() <= deadline:
            time.sleep(POLL_S)
    return True


def _guard(work: Path) -> tuple[int, int] | None:
    """The guard's pid, which is its process group's too, and start time; None when it has ended."""
    try:
        pid = int((work / "lazy-pid").read_text())
        ticks = start_ticks(pid)
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return (pid, ticks) if ticks and os.fsencode(work) in command else None
