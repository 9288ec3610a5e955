"""What `belayer` writes on a terminal when something unforeseen breaks: where, and nobody's password."""

from __future__ import annotations

import contextlib
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
    subprocess.run([sys.executable, "-c", PROGRAM], stderr=theirs, check=True)
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # EIO at the end: nobody has the other side any more
        while True:
            said += os.read(ours, 1 << 16)
    os.close(ours)
    assert b"unforeseen" in said and b"log_in" in said
    assert b"geheim" not in said
