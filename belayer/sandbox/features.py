"""What CRIU finds out about the kernel, kept until the machine starts again.

CRIU asks the kernel at each start what it can do (0.05 s, on a busy machine 0.3 s), and keeps the answers in CACHE if
that lies on a tmpfs, so that no other kernel ever reads them. Where /run is not one, we let CRIU write the answers to a
tmpfs in a mount namespace of its own, put them on a small tmpfs that only root sees, and make CACHE a link to there:
after a start of the machine it leads nowhere, and CRIU asks again. What cannot be kept is asked at each start.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import structlog

from belayer.sandbox.text import lines_of

CACHE = Path("/run/criu.kdat")
FOLDER = Path("/run/belayer-criu")
STUCK_S = 60.0
"""So long nobody takes to write the answers."""
TIMEOUT_S = 20.0
ASK = 'mount -t tmpfs -o mode=0700 tmpfs /run && { "$0" check >/dev/null 2>&1; cat "$1"; }'
log = structlog.get_logger("belayer.sandbox")


def keep(criu: Path) -> None:
    """See to it that CRIU's answers are kept. Blocks, about 0.2 s the first time after a start of the machine."""
    try:
        remove_stuck(CACHE.with_name(f"{CACHE.name}.tmp"))
        if not CACHE.exists() and not _is_tmpfs(CACHE.parent):
            FOLDER.mkdir(mode=0o700, exist_ok=True)
            with (CACHE.parent / "belayer-criu.lock").open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not CACHE.exists():
                    _keep(criu)
    except (OSError, subprocess.SubprocessError) as error:
        log.info("CRIU asks the kernel at each start what it can do", error=str(error))


def _keep(criu: Path) -> None:
    if not FOLDER.is_mount():
        mount = ("mount", "-t", "tmpfs", "-o", "mode=0700,size=1m", "belayer-criu", str(FOLDER))
        subprocess.run(mount, check=True, capture_output=True, timeout=TIMEOUT_S)
    ask = ("unshare", "--mount", "sh", "-c", ASK, str(criu), str(CACHE))
    answers = subprocess.run(ask, check=True, capture_output=True, timeout=TIMEOUT_S).stdout
    new = FOLDER / "new"
    new.write_bytes(answers)
    new.rename(FOLDER / CACHE.name)
    CACHE.unlink(missing_ok=True)
    CACHE.symlink_to(FOLDER / CACHE.name)


def remove_stuck(partial: Path) -> None:
    """Remove a file with half the answers that a killed CRIU has left: no other would ever write one."""
    with suppress(FileNotFoundError):
        if time.time() - partial.stat().st_mtime > STUCK_S:
            partial.unlink()


def _is_tmpfs(folder: Path) -> bool:
    """Whether CRIU keeps its answers there by itself."""
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    mounts = (line.split(" - ") for line in lines_of(Path("/proc/self/mountinfo")))
    return any(before.split()[2] == wanted and after.startswith("tmpfs ") for before, after in mounts)
