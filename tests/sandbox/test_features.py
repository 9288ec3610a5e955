"""CRIU's answers about the kernel: kept until the machine starts again, in a /run that is not a tmpfs too."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer.sandbox.features import STUCK_S, remove_stuck
from belayer.sandbox.home import default_home
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.sandbox

STORY = """
import subprocess, sys
from pathlib import Path
from belayer.sandbox import features

criu = Path(sys.argv[1])

def asks():
    done = subprocess.run([criu, "check", "-v4"], capture_output=True, text=True, timeout=100)
    return "Loaded kdat cache" not in done.stderr + done.stdout

assert asks() and asks(), "this /run keeps them without us"
features.keep(criu)
assert not asks()
before = features.CACHE.stat().st_ino
features.keep(criu)
assert features.CACHE.stat().st_ino == before
subprocess.run(["umount", features.FOLDER], check=True)  # what a start of the machine does
assert asks(), "answers of before the start were believed"
features.keep(criu)
assert not asks()
print("as it should be")
"""


@pytest.fixture
def on_disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=default_home()) as folder:
        yield Path(folder)


def test_they_are_kept_until_the_machine_starts_again(on_disk: Path) -> None:
    """In a mount namespace of its own, with another /run."""
    script = 'mount --bind "$1" /run && exec "$2" -c "$3" "$4"'
    words = [str(on_disk), sys.executable, STORY, str(default_home() / "criu" / "criu")]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "as it should be\n"), done.stderr


def test_what_a_killed_criu_left_half_written_is_removed(tmp_path: Path) -> None:
    partial = tmp_path / "criu.kdat.tmp"
    remove_stuck(partial)
    partial.touch()
    remove_stuck(partial)
    assert partial.exists(), "somebody may be writing it"
    long_ago_s = time.time() - STUCK_S - 1
    os.utime(partial, (long_ago_s, long_ago_s))
    remove_stuck(partial)
    assert not partial.exists()
