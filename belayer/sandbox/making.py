"""Containers made from an image, from a checkpoint, or from a spare one that waits. Callers remove what fails half-way.

A checkpoint of a quiet container is a fresh container over the saved files, whose runner is told where to go on; any
other is restored by CRIU, through Docker and runc, so that Docker lists, enters, logs and ends it like its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from belayer.errors import RestoreFailedError, SandboxFailedError
from belayer.processes import host_name, is_alive, start_ticks
from belayer.sandbox import given, lazy
from belayer.sandbox.apply import apply
from belayer.sandbox.captured import rebase
from belayer.sandbox.containers import Container, Containers
from belayer.sandbox.control import SHARED_BYTES, make_folder
from belayer.sandbox.docker_sandbox import DockerSandbox
from belayer.sandbox.gate import Gate
from belayer.sandbox.given import Edited
from belayer.sandbox.home import Home
from belayer.sandbox.layer import fill
from belayer.sandbox.manifest import IMAGES, LAYER, RUNNER_STATE, Manifest, read_edited, read_index, read_probe
from belayer.sandbox.mounts import criu_settings, mount_bounded
from belayer.sandbox.owner import Owner
from belayer.sandbox.protocol import Incarnation
from belayer.sandbox.quiet import traits

P = ParamSpec("P")
T = TypeVar("T")
PROBE_S = 20.0
"""How long a started or restored runner may take to answer for the first time."""


class Maker:
    """Makes the containers of one Belayer folder. Its blocking steps run in threads."""

    def __init__(self, home: Home, containers: Containers) -> None:
        self._home = home
        self._containers = containers

    async def fresh(self, name: str, owner: Owner) -> Incarnation:
        """A started container of the image, whose runner answers."""
        made = await _to_its_end(self._make, name, owner, None)
        here = _incarnation(await _to_its_end(self._containers.start, made.id))
        self._give(name, made)
        async with DockerSandbox(self._home, here) as sandbox:
            await sandbox.ping(PROBE_S)
        self._note(here)
        return here

    async def restored(self, name: str, owner: Owner, checkpoint: Path, manifest: Manifest, action: int) -> Incarnation:
        """A container in the checkpoint's state, whose runner says so."""
        here = await _to_its_end(self._restore, name, owner, checkpoint, manifest)
        await self._probe(here, checkpoint, manifest, action)
        if manifest.quiet:
            self._note(here)
        return here

    async def from_spare(
        self, spare: str, name: str, owner: Owner, checkpoint: Path, manifest: Manifest, action: int
    ) -> Incarnation | None:
        """The same from a spare container, for a quiet checkpoint. None when somebody else has taken the spare."""
        here = await _to_its_end(self._take, spare, name, owner, checkpoint, manifest)
        if here is not None:
            await self._probe(here, checkpoint, manifest, action)
        return here

    # --- steps ---

    def _note(self, here: Incarnation) -> None:
        """What the container is like while nobody but the runner is in it."""
        owner = self._owner(here.name)
        self._home.set_owner(here.name, msgspec.structs.replace(owner, traits=traits(here.pid, owner.spec.tmpfs)))

    def _give(self, name: str, made: Container, edited: Edited | None = None) -> None:
        """Note what Docker has given to the container that starts, then give it what the checkpoint holds instead."""
        found = given.read(made.given, made.volumes)
        self._home.set_owner(name, msgspec.structs.replace(self._owner(name), given=found))
        if edited is not None:
            now = edited.here(found)
            given.put(made.given, {file: now[file] for file in edited.files})

    def _owner(self, name: str) -> Owner:
        owner = self._home.owner(name)
        if owner is None:
            raise SandboxFailedError(name, "its folder is gone")
        return owner

    def _make(self, name: str, owner: Owner, action: int | None) -> Container:
        self._home.make_run_folder(name, owner)
        control = self._home.control_folder(name)
        mount_bounded(control.parent, SHARED_BYTES)
        make_folder(control, action)
        made = self._containers.create(name, owner, control)
        self._home.set_owner(name, msgspec.structs.replace(owner, container_id=made.id))
        return made

    def _restore(self, name: str, owner: Owner, checkpoint: Path, manifest: Manifest) -> Incarnation:
        edited = read_edited(checkpoint, manifest)
        made = self._make(name, owner, None if manifest.quiet else manifest.action)
        fill(checkpoint / LAYER, made.upper)
        self._rebase(name, checkpoint, made.upper)
        if manifest.quiet:
            here = _incarnation(self._containers.start(made.id))
            self._give(name, made, edited)
            return here
        work = self._home.restore_folder(name)
        work.mkdir(mode=0o700)
        images = checkpoint / IMAGES
        lazily = lazy.is_worth_it(size for image, (size, _) in manifest.images.items() if image.startswith("pages-"))
        give = partial(self._give, name, made, edited)
        with Gate(checkpoint.name, read_probe(checkpoint), work, memory=not lazily, prepare=give) as gate:
            (work / "criu.conf").write_text(criu_settings(manifest.mounts, made.id, work / "empty") + gate.settings)
            if lazily:
                lazy.start(self._home.criu / "criu", images, work, made.id)
            here = _incarnation(self._containers.restore(made.id, images, work, lazily))
        if lazily:
            lazy.watch_over(work, here.pid)
        return here

    def _take(self, spare: str, name: str, owner: Owner, checkpoint: Path, manifest: Manifest) -> Incarnation | None:
        before = self._home.owner(spare)
        if before is None or not before.traits:
            return None
        edited = read_edited(checkpoint, manifest)
        taken = msgspec.structs.replace(owner, container_id=before.container_id, traits=before.traits)
        if not self._home.hand_over(spare, name, taken):
            return None
        self._containers.rename(before.container_id, name)
        found = self._containers.inspect(before.container_id)
        here = _incarnation(found)
        apply(checkpoint / LAYER, Path(f"/proc/{here.pid}/root"))
        if not is_alive(here.pid, here.pid_start_ticks):
            raise SandboxFailedError(name, "the spare container ended")
        self._rebase(name, checkpoint, found.upper)
        self._give(name, found, edited)
        return here

    def _rebase(self, name: str, checkpoint: Path, upper: Path) -> None:
        index = read_index(checkpoint)
        if index is not None:
            self._home.set_captured(name, rebase(upper, index))

    async def _probe(self, here: Incarnation, checkpoint: Path, manifest: Manifest, action: int) -> None:
        async with DockerSandbox(self._home, here) as sandbox:
            if manifest.quiet:
                await sandbox.adopt((checkpoint / RUNNER_STATE).read_bytes(), action, PROBE_S)
            last = await sandbox.ping(PROBE_S)
        if last != action:
            raise RestoreFailedError(checkpoint.name, f"its runner says {last} actions, not {action}")


async def _to_its_end(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Work in a thread. A cancellation takes effect when it is done: nothing is made behind the back of the remover."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([working])
        working.exception()  # told to nobody: the cancellation counts
        raise


def _incarnation(container: Container) -> Incarnation:
    ticks = start_ticks(container.pid) if container.pid else 0
    if not ticks:
        raise SandboxFailedError(container.name, "its process 1 ended at once; `docker logs` may say why")
    return Incarnation(container.name, container.id, container.image_digest, host_name(), container.pid, ticks)
