"""What the comparison with the undisturbed run leaves out, and why. Data, so that the demo can print it.

Nothing here may hide a difference that a failure makes: each entry is something that also differs between two
undisturbed runs, or that only describes when and where a thing ran.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple


class LeftOut(NamedTuple):
    """One thing that is not compared."""

    what: str
    reason: str


class Mask(NamedTuple):
    """A piece of text in observations and file names that is replaced before the comparison."""

    what: str
    reason: str
    pattern: re.Pattern[bytes]
    replacement: bytes


_PATHS: tuple[tuple[re.Pattern[str], LeftOut], ...] = (
    (
        re.compile(r"(^|/)(__pycache__(/|$)|[^/]*\.pyc$)"),
        LeftOut("__pycache__ and *.pyc files", "Python writes the source's time stamp into them"),
    ),
    (
        re.compile(r"(^|/)\.git/index$"),
        LeftOut(".git/index", "git keeps times and inode numbers of the work tree in it"),
    ),
)

MASKS: tuple[Mask, ...] = (
    Mask(
        "durations (0.18s, 1.2 seconds, 35 ms, 122.04s (0:02:02))",
        "how long a command took depends on the machine's load",
        re.compile(rb"\b\d+(\.\d+)?( ?)(s|ms|sec|secs|seconds|milliseconds)\b( \(\d+:\d\d:\d\d\))?"),
        rb"<duration>",
    ),
    Mask(
        "bars of = around a duration",
        "pytest fills its last line up to the terminal's width, so they vary with the duration's length",
        re.compile(rb"^=+ (.* in <duration>.*?) =+$", re.MULTILINE),
        rb"<bar> \1 <bar>",
    ),
    Mask(
        "dates and times (Nov 30 06:51, 2026-11-30 06:51:12)",
        "they say when the run was",
        re.compile(
            rb"\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}\d{1,2} +(\d{2}:\d{2}(:\d{2})?|\d{4})\b"
            rb"|\b\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}([.,]\d+)?)?)?\b|\b\d{2}:\d{2}:\d{2}([.,]\d+)?\b"
        ),
        rb"<time>",
    ),
    Mask(
        "addresses in memory (0x7f0c5a3b2d10)",
        "the kernel places each process's memory at random",
        re.compile(rb"\b0x[0-9a-f]{8,16}\b"),
        rb"<address>",
    ),
    Mask(
        "names of temporary files (/tmp/tmpab12cd_9)",
        "Python and mktemp choose them at random",
        re.compile(rb"/tmp/(tmp[a-z0-9_]{8}\b|tmp\.[A-Za-z0-9]{6,12}\b)"),
        rb"/tmp/<temporary>",
    ),
    Mask(
        "process ids (pid 123)",
        "a restored container has counted other processes since",
        re.compile(rb"\b([Pp][Ii][Dd])(s?[ =:]+)\d+\b"),
        rb"\1\2<pid>",
    ),
)

OTHER: tuple[LeftOut, ...] = (
    LeftOut("times of files", "they say when the run was; CRIU and the layer's copy keep them, but two runs differ"),
    LeftOut("sizes of directories", "a file system's directories grow and do not shrink; contents are compared"),
    LeftOut("mounts other than /dev/shm", "they are Docker's (/proc, /sys, /etc/hosts) or Belayer's control folder"),
    LeftOut(
        "Python's hash randomness", "containers have PYTHONHASHSEED=0: else a set prints differently in each process"
    ),
    LeftOut("durations in the journal", "how long an action took depends on the machine's load"),
    LeftOut("digests of raw outputs in the journal", "the outputs themselves are compared, as the model saw them"),
)


def everything() -> list[LeftOut]:
    """All of it, for a person to read."""
    masks = [LeftOut(mask.what, mask.reason) for mask in MASKS]
    return [*(left_out for _, left_out in _PATHS), *masks, *OTHER]


def is_left_out(path: str) -> bool:
    """Whether the file at this absolute path is not compared."""
    return any(pattern.search(path) for pattern, _ in _PATHS)


def masked(text: bytes) -> bytes:
    """The text with everything replaced that a mask covers."""
    for mask in MASKS:
        text = mask.pattern.sub(mask.replacement, text)
    return text


_TEMPORARY = next(mask for mask in MASKS if mask.replacement == b"/tmp/<temporary>")


def masked_path(path: str) -> str:
    """The path with the random part of a temporary name replaced."""
    return _TEMPORARY.pattern.sub(_TEMPORARY.replacement, os.fsencode(path)).decode(errors="surrogateescape")
