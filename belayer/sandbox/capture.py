"""full_checkpoint: a container's writable layer and processes, at one instant, into a folder that is then published.

Order: refuse what would not be captured whole; start CRIU; freeze; verify, frozen, that the runner is idle after the
expected action and that no process is outside its tree; dump; copy the layer while the processes are still held; thaw,
whatever happened; and only then digests, fsync, manifest, rename. Should this process die at any point, its lock goes
with it: the next to look thaws the container, and the folder, never published, is removed.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from belayer.errors import CheckpointFailedError, CheckpointRefusedError, SandboxFailedError
from belayer.processes import is_alive
from belayer.sandbox import layer
from belayer.sandbox.containers import RUN_LABEL, TRAJECTORY_LABEL, Container
from belayer.sandbox.control import read_marker
from belayer.sandbox.criu import Criu, CriuError, Target, Worker
from belayer.sandbox.freezer import Freezer, freezer_of
from belayer.sandbox.home import Home
from belayer.sandbox.manifest import Manifest, boot_id, write_manifest
from belayer.sandbox.mounts import external_mounts
from belayer.sandbox.protocol import CheckpointReport, Incarnation
from belayer.sandbox.tree import described, is_dying, outsiders

LOCK_S = 5.0
SETTLE_S = 1.0
"""How long the runner may take from delivering its answer to saying that it is idle."""
POLL_S = 0.001


class Capture:
    """One full_checkpoint. `run` blocks, in a thread; `cancel` makes it give up soon, from any thread."""

    def __init__(
        self, home: Home, criu: Criu, incarnation: Incarnation, container: Container, name: str, action: int
    ) -> None:
        self._home = home
        self._criu = criu
        self._incarnation = incarnation
        self._container = container
        self._name = name
        self._action = action
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self, timeout_s: float) -> CheckpointReport:
        """CheckpointRefusedError, CheckpointFailedError or SandboxFailedError: nothing is left, nothing is frozen."""
        started = time.monotonic()
        deadline = started + timeout_s
        try:
            with self._home.locked(self._incarnation.name, LOCK_S) as lock:
                return self._locked(lock, started, deadline)
        except FileNotFoundError:
            raise SandboxFailedError(self._incarnation.name, "its folder is gone") from None
        except TimeoutError as error:
            cause = str(error) or "another checkpoint of it is at work"
            raise CheckpointRefusedError(self._incarnation.name, cause) from None

    def _locked(self, lock: int, started: float, deadline: float) -> CheckpointReport:
        freezer = self._alive_freezer()
        freezer.thaw()  # a dead checkpointer's
        self._refuse_outsiders(freezer.processes())
        self._await_idle(deadline)
        try:
            with self._home.partial(self._name) as folder, self._criu.worker(keep_open=[lock]) as worker:
                (folder / "images").mkdir(mode=0o700)
                (folder / "layer").mkdir(mode=0o700)
                target = Target(
                    self._incarnation.pid,
                    self._container.merged,
                    freezer.folder,
                    external_mounts(self._incarnation.pid),
                )
                frozen_s = self._frozen(freezer, worker, target, folder, deadline)
                size_bytes = self._seal(folder, frozen_s)
                self._stop_if_cancelled()
                self._home.publish(folder, self._name)
        except (CriuError, OSError) as error:
            raise CheckpointFailedError(self._name, str(error)) from None
        return CheckpointReport(size_bytes, frozen_s, time.monotonic() - started)

    def _frozen(self, freezer: Freezer, worker: Worker, target: Target, folder: Path, deadline: float) -> float:
        self._stop_if_cancelled()
        began = time.monotonic()
        freezer.freeze(self._incarnation.name)
        try:
            held = freezer.processes()
            self._verify(held)
            worker.dump(
                target,
                folder / "images",
                _left(deadline),
                before_thaw=lambda: layer.copy(self._container.upper, folder / "layer", _left(deadline)),
                still_wanted=lambda: self._in_the_way(held),
            )
        finally:
            freezer.thaw()
        return time.monotonic() - began

    def _in_the_way(self, held: list[int]) -> str | None:
        """Why the dump must be given up."""
        if self._cancelled.is_set():
            return "it was cancelled"
        for pid in held:
            if is_dying(pid):
                return f"process {described(pid)} was killed meanwhile"
        return None

    def _verify(self, held: list[int]) -> None:
        """With everything stopped: is this the boundary that was asked for, and all of it?"""
        self._alive_freezer()
        marker = read_marker(self._home.control_folder(self._incarnation.name))
        if marker != ("idle", self._action):
            raise CheckpointRefusedError(self._incarnation.name, f"it is {_in_words(marker)}, not after {self._action}")
        self._refuse_outsiders(held)

    def _await_idle(self, deadline: float) -> None:
        control = self._home.control_folder(self._incarnation.name)
        settled = min(deadline, time.monotonic() + SETTLE_S)
        while (marker := read_marker(control)) != ("idle", self._action):
            passed = marker is not None and (marker[1] > self._action or marker[0] == "idle")
            if passed or time.monotonic() > settled:
                raise CheckpointRefusedError(
                    self._incarnation.name, f"it is {_in_words(marker)}, not after {self._action}"
                )
            time.sleep(POLL_S)

    def _refuse_outsiders(self, processes: list[int]) -> None:
        strangers = outsiders(self._incarnation.pid, processes)
        if strangers:
            cause = "a process that `docker exec` started lives in it and would be lost; end it first"
            raise CheckpointRefusedError(self._incarnation.name, cause, described(strangers[0]))

    def _alive_freezer(self) -> Freezer:
        freezer = freezer_of(self._incarnation.pid)
        if freezer is None or not is_alive(self._incarnation.pid, self._incarnation.pid_start_ticks):
            raise SandboxFailedError(self._incarnation.name, "its process 1 is gone")
        return freezer

    def _seal(self, folder: Path, frozen_s: float) -> int:
        images = {
            path.name: (path.stat().st_size, layer.file_digest(path)) for path in sorted((folder / "images").iterdir())
        }
        summary = layer.summarize(folder / "layer")
        manifest = Manifest(
            checkpoint=self._name,
            run=self._container.labels.get(RUN_LABEL, ""),
            trajectory=self._container.labels.get(TRAJECTORY_LABEL, ""),
            incarnation=self._incarnation.name,
            action=self._action,
            image_digest=self._container.image_digest,
            boot_id=boot_id(),
            created_at_s=time.time(),
            frozen_s=frozen_s,
            images=images,
            layer_entries=summary.entries,
            layer_bytes=summary.size_bytes,
            layer_digest=summary.digest,
        )
        write_manifest(folder, manifest)
        return manifest.size_bytes

    def _stop_if_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise CheckpointFailedError(self._name, "it was cancelled")


def _left(deadline: float) -> float:
    return max(1.0, deadline - time.monotonic())


def _in_words(marker: tuple[str, int] | None) -> str:
    return "not started" if marker is None else f"{marker[0]} with action {marker[1]}"
