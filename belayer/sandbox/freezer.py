"""Stops and continues all processes of a container at one instant, through its cgroup (v1 freezer or v2).

A cgroup stays frozen when whoever froze it dies; therefore the one who freezes holds the incarnation's lock, and anyone
who finds a container frozen with the lock free may thaw it (`owner.py`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from belayer.errors import HostUnfitError, SandboxFailedError
from belayer.sandbox.mounts import mounted

POLL_S = 0.0002


@dataclass(frozen=True, slots=True)
class Freezer:
    """The freezer of one cgroup."""

    folder: Path
    version: int

    @property
    def frozen(self) -> bool:
        """Whether every process of the cgroup is stopped. A cgroup that is gone is not frozen."""
        try:
            if self.version == 1:
                return (self.folder / "freezer.state").read_text().strip() == "FROZEN"
            return "frozen 1" in (self.folder / "cgroup.events").read_text()
        except (FileNotFoundError, OSError):
            return False

    @property
    def freezing(self) -> bool:
        """Whether the cgroup is frozen or on the way to it."""
        try:
            if self.version == 1:
                return (self.folder / "freezer.state").read_text().strip() != "THAWED"
            return (self.folder / "cgroup.freeze").read_text().strip() == "1"
        except (FileNotFoundError, OSError):
            return False

    def freeze(self, incarnation: str, timeout_s: float = 5.0) -> None:
        """Return once all processes are stopped. SandboxFailedError, thawed again, when that takes too long."""
        deadline = time.monotonic() + timeout_s
        try:
            self._write(True)
            while not self.frozen:
                if time.monotonic() > deadline:
                    raise SandboxFailedError(incarnation, f"its processes could not be frozen within {timeout_s:.1f} s")
                time.sleep(POLL_S)
                if self.version == 1:
                    self._write(True)  # v1 needs the kick when a process forked meanwhile
        except OSError as error:
            self.thaw()
            raise SandboxFailedError(incarnation, f"its cgroup cannot be frozen: {error}") from None
        except BaseException:
            self.thaw()
            raise

    def thaw(self) -> None:
        """Let the processes go on. A cgroup that is gone is fine."""
        try:
            self._write(False)
        except (FileNotFoundError, OSError):
            return

    def processes(self) -> list[int]:
        """Host pids of all processes in the cgroup and those below it."""
        found: list[int] = []
        for listing in [self.folder / "cgroup.procs", *self.folder.glob("*/**/cgroup.procs")]:
            try:
                found.extend(int(pid) for pid in listing.read_text().split())
            except (FileNotFoundError, OSError):
                continue
        return found

    def _write(self, frozen: bool) -> None:
        if self.version == 1:
            (self.folder / "freezer.state").write_text("FROZEN" if frozen else "THAWED")
        else:
            (self.folder / "cgroup.freeze").write_text("1" if frozen else "0")


def freezer_of(pid: int) -> Freezer | None:
    """The freezer of the cgroup that the process is in; None when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    mounts = _cgroup_mounts()
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    for controllers, path in paths.items():
        if "freezer" in controllers.split(",") and "freezer" in mounts:
            return _checked(mounts["freezer"], path, 1)
    if "" in paths and "" in mounts:
        return _checked(mounts[""], paths[""], 2)
    raise HostUnfitError("cgroups", "no freezer is mounted", "mount cgroup2 on /sys/fs/cgroup")


def _checked(mount: Path, path: str, version: int) -> Freezer | None:
    # The root cgroup holds the whole machine: a process that is leaving its own shows up there.
    folder = mount / path.strip("/")
    return None if folder == mount or ".." in folder.parts else Freezer(folder, version)


def _cgroup_mounts() -> dict[str, Path]:
    """Controller name -> where it is mounted; "" is cgroup v2."""
    mounts: dict[str, Path] = {}
    for mount in mounted("self"):
        if mount.kind == "cgroup2":
            mounts.setdefault("", Path(mount.where))
        elif mount.kind == "cgroup" and "freezer" in mount.options.split(","):
            mounts.setdefault("freezer", Path(mount.where))
    return mounts
