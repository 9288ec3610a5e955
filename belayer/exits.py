"""How a command ends: the exit statuses of `belayer` and `python -m replay`, and what is said when output fails.

Nothing about writing one's output is a bug of ours: a reader that goes away (`| head`), a full disk, a closed stdout.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

USAGE = 2
"""Something that a person can put right."""
INTERRUPTED = 130
"""After Ctrl-C."""
READER_GONE = 141
"""Whoever read stdout went away: as of a program that SIGPIPE ends. Neither a yes nor a no."""

_PUT_RIGHT = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO}


def guarded(program: str, work: Callable[[], int]) -> int:
    """The work's exit status, or that of what kept it from writing; an OSError of another kind is raised."""
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]  # closed by whoever started us
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    try:
        status = work()
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:  # rich makes the second of the first
        if isinstance(error, SystemExit) and error.code != 1:
            raise
        _drop_output()
        return READER_GONE
    except OSError as error:
        if error.errno not in _PUT_RIGHT:
            raise
        _drop_output()
        sys.stderr.write(f"{program}: {error.filename or 'the output'} cannot be written: {error.strerror}\n")
        return USAGE
    return status


def _drop_output() -> None:
    """What is still to be written goes nowhere: Python would try again at its end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
