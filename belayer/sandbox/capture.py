"""full_checkpoint: a container's writable layer and processes, at one instant, into a folder that is then published.

Order: refuse what would not be captured whole; copy the layer while it may still move; freeze; verify, frozen, that the
runner is idle after the expected action and that no process is outside its tree; dump the processes, unless there is
nothing but the idle runner; make the copy of the layer exact, the processes still held; thaw, whatever happened; and
only then digests, fsync, manifest, rename.
 Should this process die at any point, its lock goes with it: the next to
look thaws the container, and the folder, never published, is removed.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

from belayer.errors import CheckpointFailedError, CheckpointRefusedError, RestoreFailedError, SandboxFailedError
from belayer.processes import is_alive
from belayer.sandbox import attributes, given, lazy, memory, probe, watches
from belayer.sandbox.blobs import image_path, keys_of, layer_path
from belayer.sandbox.captured import Captured
from belayer.sandbox.containers import Container
from belayer.sandbox.control import read_marker
from belayer.sandbox.criu import Criu, CriuError, Target
from belayer.sandbox.eager import keep_eager
from belayer.sandbox.freezer import Freezer, freezer_of
from belayer.sandbox.home import Home
from belayer.sandbox.layer import LayerCapture, Mapped
from belayer.sandbox.limits import LIMITS, Bounds, Limits
from belayer.sandbox.machine import this_machine
from belayer.sandbox.manifest import (
    EDITED,
    IMAGES,
    LAYER,
    LAYER_INDEX,
    PROBE,
    RUNNER_STATE,
    Manifest,
    boot_id,
    read_edited,
    read_manifest,
    sizes_and_digests,
    write_manifest,
)
from belayer.sandbox.mapped import mapped_inodes
from belayer.sandbox.mounts import external_mounts
from belayer.sandbox.obstacles import obstacle
from belayer.sandbox.protocol import CheckpointReport, Incarnation
from belayer.sandbox.quiet import attributes_in, noise
from belayer.sandbox.tree import described, is_dying, outsiders
from belayer.sandbox.unchanged import is_unchanged

LOCK_S = 5.0
SETTLE_S = 1.0
"""How long the runner may take from delivering its answer to saying that it is idle."""
POLL_S = 0.001
FREEZE_TRIES = 5
LAZY_S = 20.0
ASK_EVERY_S = 0.1


class Capture:
    """One full_checkpoint. `run` blocks, in a thread; `cancel` makes it give up soon, from any thread."""

    def __init__(
        self,
        home: Home,
        criu: Criu,
        incarnation: Incarnation,
        container: Container,
        name: str,
        action: int,
        runner: bytes,
        since: str = "",
        hold: bool = False,
        limits: Limits = LIMITS,
    ) -> None:
        self._home = home
        self._criu = criu
        self._incarnation = incarnation
        self._container = container
        self._name = name
        self._action = action
        self._runner = runner
        self._since = since
        self._hold = hold
        self._owner = home.owner(incarnation.name)
        self._traits = "" if self._owner is None else self._owner.traits
        self._given = {} if self._owner is None else self._owner.given
        self._bounds = Bounds(incarnation.name, name, limits)
        self._noise = ""
        self._edited = given.Edited({}, b"")
        self._mounts: dict[str, str] = {}
        self._frozen_at = 0.0
        self._probe = probe.Probe({})

    def cancel(self) -> None:
        self._bounds.cancel()

    def run(self) -> CheckpointReport:
        """CheckpointRefusedError, CheckpointFailedError or SandboxFailedError: nothing is left, nothing is frozen."""
        started = time.monotonic()
        try:
            with self._home.locked(self._incarnation.name, LOCK_S) as lock:
                return self._locked(lock, started)
        except FileNotFoundError:
            raise SandboxFailedError(self._incarnation.name, "its folder is gone") from None
        except TimeoutError:
            cause = "another checkpoint of it is at work"
            raise CheckpointRefusedError(self._incarnation.name, cause) from None

    def _locked(self, lock: int, started: float) -> CheckpointReport:
        freezer = self._alive_freezer()
        freezer.thaw()  # a dead checkpointer's
        self._refuse_outsiders(freezer.processes())
        self._await_idle()
        try:
            given.read(self._container.given, self._container.volumes)
        except OSError as error:
            raise CheckpointRefusedError(self._incarnation.name, str(error)) from None
        try:
            if self._hold:
                self._freeze(freezer)
            return self._capture(freezer, lock, started)
        finally:
            freezer.thaw()

    def _capture(self, freezer: Freezer, lock: int, started: float) -> CheckpointReport:
        known = self._home.captured(self._incarnation.name)
        saved = None if known is None else self._home.checkpoint(known.checkpoint) / LAYER
        if known is not None and (frozen_s := self._nothing_new(freezer, known)):
            return CheckpointReport(0, frozen_s, time.monotonic() - started, known.checkpoint, self._container.volumes)
        try:
            with self._home.partial(self._name) as folder, ExitStack() as before_removal:
                before_removal.callback(freezer.thaw)
                for part in (IMAGES, LAYER):
                    (folder / part).mkdir(mode=0o700)
                merged = self._container.merged
                with LayerCapture(self._container.upper, folder / LAYER, known, saved, merged, self._bounds) as layer:
                    frozen_s = self._quietly(freezer, layer)
                    frozen_s = frozen_s or self._with_processes(freezer, lock, layer, folder / IMAGES)
                    captured = layer.finish(self._name)
                manifest = self._seal(folder, captured, frozen_s)
                fresh = {layer_path(path): found for path, found in layer.fresh().items()}
                fresh |= {image_path(name): (folder / IMAGES / name).lstat() for name in manifest.images}
                self._bounds.go_on()
                keys = keys_of(layer.entries, captured, manifest.images)
                stored_bytes = self._home.publish(folder, self._name, keys, fresh)
            # Published and durable, it is a checkpoint, whatever happens now: a failure would be said of one that is
            # there. Without this note (the container is being removed, the disk is full) the next capture copies more.
            with suppress(OSError):
                self._home.set_captured(self._incarnation.name, captured)
        except (CriuError, OSError) as error:
            raise CheckpointFailedError(self._name, str(error)) from None
        took_s = time.monotonic() - started
        return CheckpointReport(
            manifest.size_bytes, frozen_s, took_s, not_captured=self._container.volumes, stored_bytes=stored_bytes
        )

    def _nothing_new(self, freezer: Freezer, known: Captured) -> float:
        """Whether a fresh runner over what was captured last is the container as it is: the frozen time, or 0.

        Looked at twice, so that a container in which something has changed is not frozen for this.
        """
        if known.checkpoint != self._since or not self._was_quiet() or self._noise_among(freezer.processes()):
            return 0.0
        try:
            if not (is_unchanged(self._container.upper, known) and self._as_saved()):
                return 0.0
            held = self._freeze(freezer)
            same = not self._noise_among(held) and is_unchanged(self._container.upper, known) and self._as_saved()
            return time.monotonic() - self._frozen_at if same else 0.0
        except OSError as error:
            raise CheckpointFailedError(self._name, str(error)) from None
        finally:
            if not self._hold:
                freezer.thaw()

    def _as_saved(self) -> bool:
        """Whether the files that Docker binds are those that the earlier checkpoint brings back."""
        folder = self._home.checkpoint(self._since)
        try:
            saved = read_edited(folder, read_manifest(folder)) or given.Edited({}, b"")
        except RestoreFailedError:
            return False
        return given.read(self._container.given, self._container.volumes) == saved.here(self._given)

    def _look_at_given(self) -> None:
        self._edited = given.edited(self._given, given.read(self._container.given, self._container.volumes))

    def _was_quiet(self) -> bool:
        """Whether the earlier checkpoint is there, whole, and nothing but files and a runner with the same traits."""
        try:
            manifest = read_manifest(self._home.checkpoint(self._since))
        except RestoreFailedError:
            return False
        same = (manifest.image_digest, manifest.traits) == (self._container.image_digest, self._traits)
        return manifest.quiet and same and manifest.action < self._action

    def _quietly(self, freezer: Freezer, layer: LayerCapture) -> float:
        """Capture a container of nothing but files and an idle runner; the frozen time. 0: it is more than that."""
        self._noise = self._noise_among(freezer.processes())
        if self._noise:
            return 0.0
        self._bounds.check_runner_state(len(self._runner))
        self._prepare(freezer, layer)
        try:
            held = self._freeze(freezer)
            self._noise = self._noise_among(held)
            if self._noise:
                return 0.0
            layer.settle(())
            self._look_at_given()
        finally:
            freezer.thaw()
        return time.monotonic() - self._frozen_at

    def _with_processes(self, freezer: Freezer, lock: int, layer: LayerCapture, images: Path) -> float:
        """Let CRIU dump the frozen processes, and settle the layer while it holds them; the frozen time."""
        self._refuse_obstacles(freezer.processes(), held=False)
        self._await_memory()
        mounts = external_mounts(self._incarnation.pid, self._incarnation.container_id, self._container.volumes)
        self._mounts = mounts.sources
        watched = self._watched(freezer.processes())
        target = Target(self._incarnation.pid, self._container.merged, freezer.folder, mounts.names, watched)
        held = [self._incarnation.pid]  # until they are frozen, others come and go
        messages = self._criu.image_messages()
        with ExitStack() as stack:
            worker = stack.enter_context(self._criu.worker(keep_open=[lock]))
            memory_bytes = memory.size_of(freezer.processes())
            self._bounds.check_memory(memory_bytes)
            copy = memory.room_for(freezer.processes(), self._bounds.go_on)
            if copy is not None:
                stack.enter_context(copy)
            devices = {path.stat().st_dev for path in (self._container.upper, self._container.merged)}
            self._prepare(freezer, layer, lambda: mapped_inodes(freezer.processes(), devices), memory_bytes)

            def when_ready() -> None:
                held[:] = self._freeze(freezer)
                if copy is not None:
                    copy.begin(held)
                self._bounds.check_memory(memory.size_of(held))
                self._refuse_obstacles(held, held=False)
                unusual = attributes.unusual(held, attributes_in(self._traits))
                self._probe = probe.Probe(probe.take(held).processes, unusual)

            def before_release() -> None:
                self._bounds.go_on()
                layer.settle(mapped_inodes(held, devices))
                self._look_at_given()
                if copy is not None:
                    copy.complete(images, messages)

            try:
                worker.dump(
                    target,
                    images,
                    self._bounds.dump_s,
                    when_ready,
                    before_release,
                    still_wanted=lambda: _in_the_way(held),
                    without_memory=copy is not None,
                )
            finally:
                freezer.thaw()
            frozen_s = time.monotonic() - self._frozen_at
            if copy is not None:
                copy.write(images, messages)
        return frozen_s

    def _prepare(
        self, freezer: Freezer, layer: LayerCapture, mapped: Mapped = frozenset, memory_bytes: int = 0
    ) -> None:
        """Copy the layer while it may still move, if there is room for it. A container that was to be held meanwhile is
        let go when that takes too long."""
        layer_bytes = layer.look()
        self._bounds.check_disk(self._home.checkpoint(self._name).parent, layer_bytes + memory_bytes)
        if self._hold and layer_bytes > self._bounds.limits.held_bytes:
            self._hold = False
            freezer.thaw()
        layer.prepare(mapped)

    def _freeze(self, freezer: Freezer) -> list[int]:
        """Freeze the container and verify, with everything stopped, that this is the boundary that was asked for, and
        all of it; its processes. The runner may just be answering somebody: then it is let finish, a few times."""
        for _ in range(FREEZE_TRIES):
            self._await_idle()
            self._bounds.go_on()
            if not freezer.frozen:  # held from the start
                self._frozen_at = time.monotonic()
            freezer.freeze(self._incarnation.name)
            self._alive_freezer()
            marker = self._marker()
            if marker == ("idle", self._action):
                held = freezer.processes()
                self._refuse_outsiders(held)
                return held
            if marker != ("busy", self._action):
                self._refuse_marker(marker)
            freezer.thaw()
        raise CheckpointRefusedError(self._incarnation.name, "its runner is too busy answering")

    def _watched(self, processes: list[int]) -> list[str]:
        workdir = "/" if self._owner is None else self._owner.spec.workdir
        usual = [*([] if workdir == "/" else [workdir]), "/tmp", "/var/log", "/home", "/root"]
        try:
            return [*watches.places(self._incarnation.pid, processes, usual), *usual]
        except watches.NotFoundError as error:
            raise CheckpointRefusedError(self._incarnation.name, str(error), described(error.pid)) from None

    def _noise_among(self, held: list[int]) -> str:
        tmpfs = () if self._owner is None else self._owner.spec.tmpfs
        try:
            return noise(self._incarnation.pid, held, self._traits, tmpfs)
        except OSError as error:  # what cannot be looked at is not known to be nothing
            return f"unknown: {error}"

    def _await_memory(self) -> None:
        """Of the container's own restore."""
        patience = time.monotonic() + (0.0 if self._hold else LAZY_S)
        while not lazy.wait(self._home.restore_folder(self._incarnation.name), 0.0 if self._hold else ASK_EVERY_S):
            self._bounds.go_on()
            if time.monotonic() >= patience:
                self._bounds.refuse("its memory is still on its way from the last restore")

    def _await_idle(self) -> None:
        settled = time.monotonic() + SETTLE_S
        while (marker := self._marker()) != ("idle", self._action):
            passed = marker is not None and (marker[1] > self._action or marker[0] == "idle")
            if passed or time.monotonic() > settled:
                self._refuse_marker(marker)
            time.sleep(POLL_S)

    def _refuse_marker(self, marker: tuple[str, int] | None) -> NoReturn:
        found = "not started" if marker is None else f"{marker[0]} with action {marker[1]}"
        raise CheckpointRefusedError(self._incarnation.name, f"it is {found}, not after {self._action}")

    def _marker(self) -> tuple[str, int] | None:
        return read_marker(self._home.control_folder(self._incarnation.name))

    def _refuse_outsiders(self, processes: list[int]) -> None:
        strangers = outsiders(self._incarnation.pid, processes)
        if strangers:
            cause = "a process that `docker exec` started lives in it and would be lost; end it first"
            raise CheckpointRefusedError(self._incarnation.name, cause, described(strangers[0]))

    def _refuse_obstacles(self, processes: list[int], held: bool) -> None:
        found = obstacle(self._incarnation.pid, processes, held)
        if found is not None:
            raise CheckpointRefusedError(self._incarnation.name, found[1], described(found[0]))

    def _alive_freezer(self) -> Freezer:
        freezer = freezer_of(self._incarnation.pid)
        if freezer is None or not is_alive(self._incarnation.pid, self._incarnation.pid_start_ticks):
            raise SandboxFailedError(self._incarnation.name, "its process 1 is gone")
        return freezer

    def _seal(self, folder: Path, captured: Captured, frozen_s: float) -> Manifest:
        """Write what the checkpoint says of itself."""
        if self._noise:
            (folder / PROBE).write_bytes(self._probe.encode())
            if lazy.is_worth_it(path.stat().st_size for path in (folder / IMAGES).glob("pages-*")):
                keep_eager(folder / IMAGES, self._criu.image_messages())
        else:
            (folder / RUNNER_STATE).write_bytes(self._runner)
        if self._edited.files:
            (folder / EDITED).write_bytes(self._edited.encode())
        (folder / LAYER_INDEX).write_bytes(captured.encode())
        manifest = Manifest(
            checkpoint=self._name,
            run="" if self._owner is None else self._owner.run,
            trajectory="" if self._owner is None else self._owner.trajectory,
            incarnation=self._incarnation.name,
            action=self._action,
            image_digest=self._container.image_digest,
            boot_id=boot_id(),
            created_at_s=time.time(),
            frozen_s=frozen_s,
            noise=self._noise,
            traits=self._traits,
            mounts=self._mounts,
            images=sizes_and_digests(sorted((folder / IMAGES).iterdir()), self._bounds.go_on),
            notes=sizes_and_digests(folder / name for name in (RUNNER_STATE, PROBE, EDITED, LAYER_INDEX)),
            layer_entries=len(captured.entries),
            layer_bytes=captured.size_bytes,
            layer_digest=captured.digest,
            machine=this_machine(self._criu.version),
            not_captured=self._container.volumes,
        )
        write_manifest(folder, manifest)
        return manifest


def _in_the_way(held: list[int]) -> str | None:
    """Why CRIU would wait for ever."""
    for pid in held:
        if is_dying(pid):
            return f"process {described(pid)} was killed meanwhile"
    return None
