"""full_checkpoint: a container's writable layer and processes, at one instant, into a folder that is then published.

Order: refuse what would not be captured whole; copy the layer while it may still move; freeze; verify, frozen, that the
runner is idle after the expected action and that no process is outside its tree; dump the processes, unless there is
nothing but the idle runner; make the copy of the layer exact, the processes still held; thaw, whatever happened; and
only then digests, fsync, manifest, rename. Should this process die at any point, its lock goes with it: the next to
look thaws the container, and the folder, never published, is removed.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

from belayer.errors import CheckpointFailedError, CheckpointRefusedError, SandboxFailedError
from belayer.processes import is_alive
from belayer.sandbox import attributes, given, memory, probe, watches
from belayer.sandbox.at_boundary import await_idle, await_memory, refuse_marker
from belayer.sandbox.blobs import image_path, keys_of, layer_path
from belayer.sandbox.captured import Captured
from belayer.sandbox.control import read_marker
from belayer.sandbox.criu import Criu, CriuError, Target
from belayer.sandbox.files_only import InTheWay, left_out
from belayer.sandbox.freezer import Freezer, freezer_of
from belayer.sandbox.home import Home
from belayer.sandbox.layer import LayerCapture, Mapped
from belayer.sandbox.limits import LIMITS, Bounds, Limits
from belayer.sandbox.manifest import IMAGES, LAYER
from belayer.sandbox.mapped import mapped_inodes
from belayer.sandbox.mounts import external_mounts
from belayer.sandbox.obstacles import obstacle
from belayer.sandbox.protocol import CheckpointReport
from belayer.sandbox.quiet import attributes_in, noise, noises
from belayer.sandbox.sealing import Findings, Subject, seal
from belayer.sandbox.tree import described, outsiders, why_it_would_hang
from belayer.sandbox.unchanged import Earlier

LOCK_S = 5.0
FREEZE_TRIES = 5
UNREAD_S = 0.01
"""How long a process that watches files may run until it is looked at again."""
LAZY_S = 20.0


class Capture:
    """One full_checkpoint. `run` blocks, in a thread; `cancel` makes it give up soon, from any thread."""

    def __init__(
        self,
        home: Home,
        criu: Criu,
        name: str,
        subject: Subject,
        since: str = "",
        hold: bool = False,
        limits: Limits = LIMITS,
        or_files_only: bool = False,
    ) -> None:
        """`or_files_only`: when a process cannot be captured, capture the files alone (`files_only.py`)."""
        self._home = home
        self._criu = criu
        self._name = name
        self._subject = subject
        self._incarnation = subject.incarnation
        self._container = subject.container
        self._action = subject.action
        self._since = since
        self._hold = hold
        self._or_files_only = or_files_only
        self._in_the_way: InTheWay | None = None
        self._files_only = False
        self._control = home.control_folder(self._incarnation.name)
        self._bounds = Bounds(self._incarnation.name, name, limits)
        self._tmpfs = () if subject.owner is None else subject.owner.spec.tmpfs
        self._frozen_at = 0.0
        self._found = Findings()

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
        try:
            given.read(self._container.given, self._container.volumes)
        except OSError as error:
            raise CheckpointRefusedError(self._incarnation.name, str(error)) from None
        try:
            try:
                return self._capture(freezer, lock, started)
            except CheckpointRefusedError:
                if self._in_the_way is None or not self._or_files_only:
                    raise
            self._files_only = True
            return self._capture(freezer, lock, started)
        finally:
            freezer.thaw()

    def _capture(self, freezer: Freezer, lock: int, started: float) -> CheckpointReport:
        self._refuse_outsiders(freezer.processes())
        await_idle(self._control, self._incarnation.name, self._action, self._bounds.go_on)
        if self._hold:
            self._freeze(freezer)
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
                    if not frozen_s and self._in_the_way is not None:
                        frozen_s = self._without_processes(freezer, layer, self._in_the_way)
                    elif not frozen_s:
                        frozen_s = self._with_processes(freezer, lock, layer, folder / IMAGES)
                    captured = layer.finish(self._name)
                self._found.frozen_s = frozen_s
                manifest = seal(folder, self._name, self._subject, self._found, captured, self._criu, self._bounds)
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
        lacks = self._container.volumes, stored_bytes, self._found.left_out
        return CheckpointReport(manifest.size_bytes, frozen_s, time.monotonic() - started, "", *lacks)

    def _nothing_new(self, freezer: Freezer, known: Captured) -> float:
        """Whether a fresh runner over what was captured last is the container as it is: the frozen time, or 0.

        Looked at twice, so that a container in which something has changed is not frozen for this.
        """
        earlier = Earlier(self._home.checkpoint(known.checkpoint), known, self._subject)
        if known.checkpoint != self._since or not earlier.could_hold():
            return 0.0
        try:
            if self._noise_among(freezer.processes()) or not earlier.is_unchanged():
                return 0.0
            held = self._freeze(freezer)
            same = not self._noise_among(held) and earlier.is_unchanged()
            return time.monotonic() - self._frozen_at if same else 0.0
        except OSError as error:
            raise CheckpointFailedError(self._name, str(error)) from None
        finally:
            if not self._hold:
                freezer.thaw()

    def _look_at_given(self) -> None:
        self._found.edited = given.edited(
            self._subject.given, given.read(self._container.given, self._container.volumes)
        )

    def _quietly(self, freezer: Freezer, layer: LayerCapture) -> float:
        """Capture a container of nothing but files and an idle runner; the frozen time. 0: it is more than that."""
        self._found.noise = self._noise_among(freezer.processes())
        if self._found.noise:
            return 0.0
        self._bounds.check_runner_state(len(self._subject.runner))
        self._prepare(freezer, layer)
        try:
            held = self._freeze(freezer)
            self._found.noise = self._noise_among(held)
            if self._found.noise:
                return 0.0
            layer.settle(())
            self._look_at_given()
        finally:
            freezer.thaw()
        return time.monotonic() - self._frozen_at

    def _without_processes(self, freezer: Freezer, layer: LayerCapture, obstacle: InTheWay) -> float:
        """Capture the files as they are when all processes stand, and note what is left out; the frozen time."""
        devices = self._container.devices
        self._prepare(freezer, layer, lambda: mapped_inodes(freezer.processes(), devices))
        try:
            held = self._freeze(freezer)
            besides = list(noises(self._incarnation.pid, self._subject.traits, self._tmpfs))
            self._found.left_out, self._found.noise = left_out(self._incarnation, held, obstacle, besides), ""
            layer.settle(mapped_inodes(held, devices))
            self._look_at_given()
        finally:
            freezer.thaw()
        return time.monotonic() - self._frozen_at

    def _with_processes(self, freezer: Freezer, lock: int, layer: LayerCapture, images: Path) -> float:
        """Let CRIU dump the frozen processes, and settle the layer while it holds them; the frozen time."""
        self._refuse_obstacles(freezer.processes())
        await_memory(self._home.restore_folder(self._incarnation.name), self._bounds, 0.0 if self._hold else LAZY_S)
        mounts = external_mounts(self._incarnation.pid, self._incarnation.container_id, self._container.volumes)
        self._found.mounts = mounts.sources
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
            devices = self._container.devices
            self._prepare(freezer, layer, lambda: mapped_inodes(freezer.processes(), devices), memory_bytes)

            def when_ready() -> None:
                held[:] = self._freeze(freezer)
                if copy is not None:
                    copy.begin(held)
                self._bounds.check_memory(memory.size_of(held))
                self._refuse_obstacles(held)
                unusual = attributes.unusual(held, attributes_in(self._subject.traits))
                self._found.probe = probe.Probe(probe.take(held).processes, unusual)

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
                    still_wanted=lambda: why_it_would_hang(held),
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
        all of it; its processes. The runner may just be answering somebody, and a process that watches files may not
        have read yet what it was told of them: then they are let finish, a few times."""
        for tries_left in reversed(range(FREEZE_TRIES)):
            await_idle(self._control, self._incarnation.name, self._action, self._bounds.go_on)
            self._bounds.go_on()
            if not freezer.frozen:  # held from the start
                self._frozen_at = time.monotonic()
            freezer.freeze(self._incarnation.name)
            self._alive_freezer()
            marker = read_marker(self._control)
            if marker == ("idle", self._action):
                held = freezer.processes()
                self._refuse_outsiders(held)
                unread = watches.has_unread(pid for pid in held if pid != self._incarnation.pid)
                if self._hold or not tries_left or not unread:
                    return held
                freezer.thaw()
                self._bounds.wait(UNREAD_S)
                continue
            if marker != ("busy", self._action):
                refuse_marker(self._incarnation.name, self._action, marker)
            freezer.thaw()
        raise CheckpointRefusedError(self._incarnation.name, "its runner is too busy answering")

    def _watched(self, processes: list[int]) -> list[str]:
        workdir = "/" if self._subject.owner is None else self._subject.owner.spec.workdir
        usual = [*([] if workdir == "/" else [workdir]), "/tmp", "/var/log", "/home", "/root"]
        try:
            return [*watches.places(self._incarnation.pid, processes, usual), *usual]
        except watches.NotFoundError as error:
            self._refuse_process(error.pid, str(error))

    def _noise_among(self, held: list[int]) -> str:
        try:
            return noise(self._incarnation.pid, held, self._subject.traits, self._tmpfs)
        except OSError as error:  # what cannot be looked at is not known to be nothing
            return f"unknown: {error}"

    def _refuse_outsiders(self, processes: list[int]) -> None:
        strangers = () if self._files_only else outsiders(self._incarnation.pid, processes)
        if strangers:
            cause = "a process that `docker exec` started lives in it and would be lost; end it first"
            self._refuse_process(strangers[0], cause)

    def _refuse_obstacles(self, processes: list[int]) -> None:
        if found := obstacle(self._incarnation.pid, processes):
            self._refuse_process(*found)

    def _refuse_process(self, pid: int, cause: str) -> NoReturn:
        self._in_the_way = InTheWay(pid, cause)
        raise CheckpointRefusedError(self._incarnation.name, cause, described(pid))

    def _alive_freezer(self) -> Freezer:
        freezer = freezer_of(self._incarnation.pid)
        if freezer is None or not is_alive(self._incarnation.pid, self._incarnation.pid_start_ticks):
            raise SandboxFailedError(self._incarnation.name, "its process 1 is gone")
        return freezer
