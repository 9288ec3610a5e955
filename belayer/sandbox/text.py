"""Bytes that a container chose (names, command lines, names of processes), as text for events, manifests and messages.

Linux allows any bytes there but NUL. Python reads them strictly, which raises, or with surrogates (PEP 383), which
cannot be encoded again. Here what is not UTF-8 becomes a backslash and its number; nothing fails. Only newlines end a
line: other characters that Python takes for line ends are ordinary in a name.
"""

from __future__ import annotations

import os
from pathlib import Path


def shown(found: str | bytes | Path) -> str:
    """The text for it."""
    return os.fsencode(found).decode(errors="backslashreplace")


def rows_of(file: Path) -> list[bytes]:
    """A file of /proc, line by line. OSError when it cannot be read."""
    return [line for line in file.read_bytes().split(b"\n") if line]


def lines_of(file: Path) -> list[str]:
    """The same as text."""
    return [shown(line) for line in rows_of(file)]


def status_of(pid: int | str) -> dict[str, str]:
    """/proc/PID/status. OSError when the process is gone."""
    return dict(line.split(":\t", 1) for line in lines_of(Path(f"/proc/{pid}/status")) if ":\t" in line)
