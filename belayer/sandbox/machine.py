"""What of a machine a checkpoint with processes depends on, and whether another machine will do.

Files and an idle runner need nothing but the image. Processes need a CRIU and a kernel that are not older than those
that captured them, the same architecture and kind of cgroups, and every feature of the processor that programs may have
found and decided for (memcpy with AVX-512, say): it would be an illegal instruction, long after a successful restore.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True):
    """As a checkpoint's manifest records it."""

    architecture: str
    kernel: str
    """`uname -r`."""
    criu: tuple[int, int]
    cgroups: int
    """1, or 2 where there is no freezer of version 1."""
    processor: tuple[str, ...]
    """Its features, as /proc/cpuinfo names them."""


@cache
def this_machine(criu: tuple[int, int]) -> Machine:
    """The one that this process runs on."""
    features: tuple[str, ...] = ()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            features = tuple(sorted(set(value.split())))
            break
    v1 = "freezer" in Path("/proc/self/cgroup").read_text()
    return Machine(platform.machine(), platform.release(), criu, 1 if v1 else 2, features)


def unfit(there: Machine, here: Machine) -> tuple[str, str, str] | None:
    """Why processes captured `there` cannot go on `here`: what differs, its value there and here. None: they can."""
    if there.architecture != here.architecture:
        return "the architecture", there.architecture, here.architecture
    if _release(there.kernel) > _release(here.kernel):
        return "the kernel, which must not be older,", there.kernel, here.kernel
    if there.criu > here.criu:
        return "CRIU, which must not be older,", ".".join(map(str, there.criu)), ".".join(map(str, here.criu))
    if there.cgroups != here.cgroups:
        return "the version of cgroups", str(there.cgroups), str(here.cgroups)
    missing = sorted(set(there.processor) - set(here.processor))
    if missing:
        return "the processor, which must have all features,", " ".join(missing), "without them"
    return None


def _release(kernel: str) -> tuple[int, int]:
    major, minor = kernel.split(".")[:2]
    return int(major), int("".join(digit for digit in minor.split("-")[0] if digit.isdigit()) or 0)
