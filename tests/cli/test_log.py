"""What `belayer` writes on a terminal when something unforeseen breaks: where, and nobody's password."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import structlog
from belayer.cli.log import configure_log

def log_in(commands):
    raise ValueError("unforeseen")

configure_log()
try:
    log_in([("AUTH", "user", "geheim")])
except ValueError:
    structlog.get_logger("t").exception("broken")
"""


def test_a_traceback_on_a_terminal_does_not_show_variables() -> None:
    """rich shows them, and some have passwords and keys."""
    ours, theirs = os.openpty()
    with open(ours, "rb", buffering=0) as terminal:
        subprocess.run([sys.executable, "-c", PROGRAM], stderr=theirs, check=True)
        os.close(theirs)
        said = b""
        while True:
            try:
                said += terminal.read(1 << 16)
            except OSError:  # EIO: nobody has the other end any more
                break
    assert b"unforeseen" in said and b"log_in" in said
    assert b"user" not in said.replace(b'("AUTH", "user", "geheim")', b"")
