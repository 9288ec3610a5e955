"""The containers of this machine: made, found, captured, brought back and removed. Implements SandboxHost.

Everything of a container carries its incarnation's name (the container in Docker, its folder under $BELAYER_HOME), so
whatever a dead process left half made is found by name and removed by `remove`, at any time and as often as one likes.
A checkpoint's only visible state is published; a container's folder is made before the container and removed after it.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from pathlib import Path

import structlog

from belayer.errors import (
    BelayerError,
    CheckpointFailedError,
    CheckpointUnfitError,
    HostUnfitError,
    InputError,
    RestoreFailedError,
    SandboxError,
    SandboxFailedError,
)
from belayer.ids import checked_made_name
from belayer.journal.events import SandboxSpec
from belayer.processes import host_name, is_alive, kill, start_ticks
from belayer.sandbox import features, options
from belayer.sandbox.capture import Capture
from belayer.sandbox.containers import Container, Containers, DockerRefusedError
from belayer.sandbox.criu import Criu
from belayer.sandbox.docker_sandbox import DockerSandbox, thaw_abandoned
from belayer.sandbox.freezer import freezer_of
from belayer.sandbox.home import Home, default_home
from belayer.sandbox.lazy import LazyPagesError
from belayer.sandbox.limits import LIMITS, Limits
from belayer.sandbox.machine import this_machine, unfit
from belayer.sandbox.making import PROBE_S, Maker
from belayer.sandbox.manifest import Manifest, boot_id, read_manifest, verify
from belayer.sandbox.mounts import unmount_leftovers
from belayer.sandbox.owner import Owner
from belayer.sandbox.protocol import CheckpointReport, Incarnation
from belayer.sandbox.sealing import Subject
from belayer.sandbox.spares import Spares
from belayer.sandbox.tree import kill_tracers, kill_users_of

SETUP_TIMEOUT_S = 600.0
LET_GO_S = 0.5
"""How long a checkpoint at work may take to see that its container is being removed."""
REMOVE_ROUNDS = 10
LACKS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EROFS})
"""Errors of a machine that lacks room, memory or descriptors; they say nothing about what was to be restored."""
SPARES = 4
log = structlog.get_logger("belayer.sandbox")


class DockerHost:
    """See the module. `async with open_host() as host`, which checks the machine; or make one and check it yourself."""

    def __init__(
        self, home: Path | None = None, spares: int = 0, limits: Limits = LIMITS, or_files_only: bool = False
    ) -> None:
        """`spares`: how many started containers may wait for a restore; see `spares.py`. `limits`: of a checkpoint.
        `or_files_only`: whether a container with a process that cannot be captured is captured without processes
        (decision 15)."""
        self._limits = limits
        self._or_files_only = or_files_only
        self._home = Home(home or default_home())
        self._criu = Criu(self._home.criu)
        self._containers = Containers(self._home.root)
        self._maker = Maker(self._home, self._containers)
        self._spares = Spares(self._home, self._maker, self.remove, spares)

    def check(self) -> None:
        """HostUnfitError, with what to do, when this machine cannot run sandboxes. Blocks; about 0.1 s."""
        if os.geteuid() != 0:
            raise HostUnfitError("privileges", "not root", "run as root: CRIU and the containers' layers need it")
        try:
            self._home.make()
        except OSError as error:
            raise HostUnfitError("$BELAYER_HOME", str(error), "set it to a folder that root can write") from None
        self._containers.check()
        self._criu.check()
        features.keep(self._home.criu / "criu")
        self._home.remove_leftovers()

    async def close(self) -> None:
        """Let go of Docker; containers go on."""
        await self._spares.close()
        self._containers.close()

    async def spares_settled(self) -> None:
        """Return once no spare container is being made."""
        await self._spares.settled()

    # --- containers ---

    async def create(self, run: str, trajectory: str, incarnation: str, spec: SandboxSpec) -> Incarnation:
        """A fresh container at boundary 0. InputError when a set-up command fails; then nothing is left."""
        options.check(spec)
        image = await asyncio.to_thread(self._containers.image_digest, spec.image)
        await self.remove(incarnation)
        try:
            here = await self._maker.fresh(incarnation, Owner(run, trajectory, spec, image))
            async with DockerSandbox(self._home, here) as sandbox:
                for command in spec.setup:
                    done = await sandbox.set_up(command, SETUP_TIMEOUT_S)
                    if done.exit_status != 0:
                        tail = done.output[-500:].decode(errors="replace").strip()
                        raise InputError(f"set-up command {command!r} ended with {done.exit_status}: {tail}")
        except DockerRefusedError as error:
            await self._give_up(incarnation)
            raise HostUnfitError("Docker", str(error), "see `docker info` and the daemon's log") from None
        except (OSError, SandboxFailedError) as error:
            await self._give_up(incarnation)
            await asyncio.to_thread(self._check_blameless, error)
            raise
        except BaseException:
            await self._give_up(incarnation)
            raise
        return here

    async def attach(self, incarnation: Incarnation) -> DockerSandbox:
        """The live sandbox. SandboxFailedError when it is not alive or does not answer."""
        if not await self.is_alive(incarnation):
            raise SandboxFailedError(incarnation.name, f"process 1 (host pid {incarnation.pid}) is gone")
        thaw_abandoned(self._home, incarnation)
        return DockerSandbox(self._home, incarnation)

    async def is_alive(self, incarnation: Incarnation) -> bool:
        """Whether the container's process 1 runs (the same one: pid and start time)."""
        return incarnation.host == host_name() and is_alive(incarnation.pid, incarnation.pid_start_ticks)

    async def remove(self, incarnation: str) -> None:
        """Kill and remove the container and its folders, whatever state they are in. Nothing there is fine."""
        owner = self._home.owner(checked_made_name(incarnation))
        restoring = self._home.restore_folder(incarnation)
        if restoring.exists():  # a runc that hangs in a restore, a daemon that still brings pages
            await asyncio.to_thread(kill_users_of, restoring)
        # A container that was to be a spare and was taken by somebody who died still has its old name.
        container_id = "" if owner is None else owner.container_id
        for name in {incarnation, container_id} - {""}:
            with suppress(DockerRefusedError):
                await self._kill(await asyncio.to_thread(self._containers.inspect, name))
            try:
                await asyncio.to_thread(self._containers.remove, name)
            except DockerRefusedError as error:
                raise HostUnfitError("Docker", f"it does not remove {incarnation}: {error}", "see its log") from None
        await asyncio.to_thread(unmount_leftovers, container_id, self._home.run_folder(incarnation))
        try:
            await asyncio.to_thread(self._home.remove_run_folder, incarnation)
        except OSError as error:
            folder = self._home.run_folder(incarnation)
            raise HostUnfitError("$BELAYER_HOME", f"{folder} stays: {error}", "remove it by hand") from None

    async def remove_run(self, run: str) -> None:
        """Remove every container and checkpoint here that is labelled with the run. Needs no journal."""
        for _ in range(REMOVE_ROUNDS):  # a spare container may be in the making
            for name in (names := await self.incarnations(run)):
                await self.remove(name)
            if not names:
                break
        for name in await self.checkpoints(run):
            await self.remove_checkpoint(name)
        await asyncio.to_thread(self._home.remove_leftovers)

    async def incarnations(self, run: str | None = None) -> list[str]:
        """Names of all containers of ours here (of one run), dead or alive; half-made ones have only a folder."""
        found = set(await asyncio.to_thread(self._containers.names, run))
        for name in self._home.run_folders():
            owner = self._home.owner(name)
            if run is None or (owner is not None and owner.run == run):
                found.add(name)
        return sorted(found)

    # --- checkpoints ---

    async def checkpoint(
        self, incarnation: Incarnation, checkpoint: str, action: int, since: str = "", hold: bool = False
    ) -> CheckpointReport:
        """full_checkpoint; see `capture.py`. Cancelling it gives up, thaws and cleans up before it returns."""
        if not await self.is_alive(incarnation):
            raise SandboxFailedError(incarnation.name, f"process 1 (host pid {incarnation.pid}) is gone")
        checked_made_name(checkpoint)
        try:
            container = await asyncio.to_thread(self._containers.inspect, incarnation.container_id)
        except DockerRefusedError as error:
            raise SandboxFailedError(incarnation.name, str(error)) from None
        async with await self.attach(incarnation) as sandbox:
            runner = await sandbox.state()
        capture = Capture(
            self._home,
            self._criu,
            checkpoint,
            Subject(incarnation, container, self._home.owner(incarnation.name), action, runner),
            since,
            hold,
            self._limits,
            self._or_files_only,
        )
        work = asyncio.ensure_future(asyncio.to_thread(capture.run))
        try:
            report = await asyncio.shield(work)
        except asyncio.CancelledError:
            capture.cancel()
            with suppress(BelayerError):
                await work
                await self.remove_checkpoint(checkpoint)
            raise
        except CheckpointFailedError:
            await self._probe_or_kill(incarnation)
            raise
        owner = self._home.owner(incarnation.name)
        if owner is not None:
            self._spares.want(owner)
        return report

    async def restore(
        self, run: str, trajectory: str, incarnation: str, spec: SandboxSpec, checkpoint: str, action: int
    ) -> Incarnation:
        """full_restore into a new container of the same image, probed. RestoreFailedError: nothing is left of it.

        HostUnfitError: neither, but the machine is at fault (Docker down, disk full), not the checkpoint.
        """
        with self.in_use(checkpoint):
            try:
                return await self._restore(run, trajectory, incarnation, spec, checkpoint, action)
            except RestoreFailedError as error:
                await asyncio.to_thread(self._check_blameless, error)
                raise

    async def _restore(
        self, run: str, trajectory: str, incarnation: str, spec: SandboxSpec, checkpoint: str, action: int
    ) -> Incarnation:
        folder = self.checkpoint_path(checkpoint)
        manifest = await asyncio.to_thread(read_manifest, folder)
        if action < manifest.action or (action > manifest.action and not manifest.quiet):
            raise RestoreFailedError(checkpoint, f"it holds action {manifest.action}, not {action}")
        await asyncio.to_thread(self._check_machine, manifest)
        await asyncio.to_thread(verify, folder, manifest)
        if self._home.run_folder(checked_made_name(incarnation)).exists():  # its folder is there before a container is
            await self.remove(incarnation)
        owner = Owner(run, trajectory, spec, manifest.image_digest, traits=manifest.traits)
        try:
            here = await self._from_spare(incarnation, owner, folder, manifest, action)
            if here is None:
                here = await self._maker.restored(incarnation, owner, folder, manifest, action)
        except (DockerRefusedError, LazyPagesError, SandboxFailedError, OSError) as error:
            await self._give_up(incarnation)
            raise RestoreFailedError(checkpoint, str(error)) from None
        except BaseException:
            await self._give_up(incarnation)
            raise
        self._spares.want(owner)
        return here

    async def remove_checkpoint(self, checkpoint: str) -> None:
        """Remove a checkpoint's files, at once or when nobody uses them any more. Nothing there is fine."""
        await asyncio.to_thread(self._home.remove_checkpoint, checked_made_name(checkpoint))

    def in_use(self, checkpoint: str) -> AbstractContextManager[None]:
        """Keep a checkpoint's files until the end, whoever removes it meanwhile. None there is fine."""
        return self._home.in_use(checked_made_name(checkpoint))

    async def checkpoints(self, run: str | None = None) -> list[str]:
        """All published checkpoints here (of one run). What dead checkpointers left is removed on the way."""
        await asyncio.to_thread(self._home.remove_leftovers)
        return [name for name in self._home.published() if run is None or self._is_of(name, run)]

    def _is_of(self, checkpoint: str, run: str) -> bool:
        with suppress(RestoreFailedError):
            return read_manifest(self.checkpoint_path(checkpoint)).run == run
        return False

    def checkpoint_path(self, checkpoint: str) -> Path:
        """Where a published checkpoint lies."""
        return self._home.checkpoint(checkpoint)

    # --- steps ---

    def _check_blameless(self, error: BaseException) -> None:
        """HostUnfitError when what failed may have failed by this machine: it lacks something for the moment."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError) and cause.errno in LACKS:
                raise HostUnfitError("this machine", str(cause), "free some of it; this is tried again")
            cause = cause.__context__
        disk = os.statvfs(self._home.root)
        if (free := disk.f_bavail * disk.f_frsize) < self._limits.spare_bytes:
            raise HostUnfitError(f"the disk of {self._home.root}", f"{free} bytes are free", "make room on it")
        self._containers.check()

    def _check_machine(self, manifest: Manifest) -> None:
        """CheckpointUnfitError when it was made on another machine, and cannot go on here."""
        if manifest.boot_id == boot_id():
            return
        name = manifest.checkpoint
        try:
            self._containers.image_digest(manifest.image_digest)
        except HostUnfitError as error:
            raise CheckpointUnfitError(name, "the image", manifest.image_digest, error.found) from None
        if not manifest.quiet and manifest.machine is not None:
            difference = unfit(manifest.machine, this_machine(self._criu.version))
            if difference is not None:
                raise CheckpointUnfitError(name, *difference)

    async def _from_spare(
        self, incarnation: str, owner: Owner, folder: Path, manifest: Manifest, action: int
    ) -> Incarnation | None:
        """Brought back in a spare container; None when none waits or it does not work out."""
        if not manifest.quiet or owner.spec.read_only:  # a spare is filled from inside
            return None
        for spare in self._spares.find(owner.key):
            try:
                here = await self._maker.from_spare(spare, incarnation, owner, folder, manifest, action)
            except (DockerRefusedError, SandboxError, OSError) as error:
                log.warning("a spare container was of no use", spare=spare, error=str(error))
                await self.remove(incarnation)
                continue
            if here is not None:
                return here
        return None

    async def _kill(self, container: Container) -> None:
        """End process 1, which Docker alone cannot: frozen (cgroup v1) it dies only when thawed, traced by a CRIU whose
        checkpointer has died perhaps never."""
        ticks = start_ticks(container.pid) if container.pid else 0
        if not ticks:
            return
        freezer = freezer_of(container.pid)
        held = freezer.processes() if freezer is not None else []
        dying = asyncio.ensure_future(kill(container.pid, ticks))
        await asyncio.sleep(0)
        if freezer is not None:
            freezer.thaw()
        if not (await asyncio.wait({dying}, timeout=LET_GO_S))[0]:
            kill_tracers([container.pid, *held])
        with suppress(BelayerError):
            await dying

    async def _probe_or_kill(self, incarnation: Incarnation) -> None:
        """After a failed checkpoint: SandboxFailedError unless the container answers; a silent one is ended."""
        try:
            async with await self.attach(incarnation) as sandbox:
                await sandbox.ping(PROBE_S)
        except SandboxFailedError:
            await kill(incarnation.pid, incarnation.pid_start_ticks)
            raise

    async def _give_up(self, incarnation: str) -> None:
        """Remove what was begun, even when cancelled; an error of this is less telling than the one that led here."""
        with suppress(SandboxError):
            await asyncio.shield(self.remove(incarnation))


@asynccontextmanager
async def open_host(
    home: Path | None = None, spares: int = SPARES, limits: Limits = LIMITS, or_files_only: bool = False
) -> AsyncIterator[DockerHost]:
    """A checked DockerHost of $BELAYER_HOME (default /var/lib/belayer). HostUnfitError says what is missing."""
    host = DockerHost(home, spares, limits, or_files_only)
    try:
        await asyncio.to_thread(host.check)
        yield host
    finally:
        await host.close()
