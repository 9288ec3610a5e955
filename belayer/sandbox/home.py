"""Belayer's folder on this machine: where a container's folder and its checkpoints lie, and who may touch them.

    HOME/criu/                       CRIU and pycriu
    HOME/run/INCARNATION/            0700; locked (flock) by whoever freezes the container
    HOME/run/INCARNATION/shared/     a small tmpfs, so that a container fills no disk of ours
    HOME/run/INCARNATION/shared/control/  the runner's control folder in it, bind-mounted into the container
    HOME/checkpoints/NAME/           a published checkpoint
    HOME/checkpoints/.partial-*      one being made, locked (flock) by its maker; unlocked: left over, to be removed
    HOME/checkpoints/.removed-*      one being removed; whoever finds it may finish
    HOME/blobs/                      files that checkpoints share; see `blobs.py`

A lock ends with the processes that hold it, so nothing here is stuck when they die.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import structlog

from belayer import ids
from belayer.errors import RestoreFailedError
from belayer.sandbox.blobs import Blobs, Keys
from belayer.sandbox.captured import Captured
from belayer.sandbox.folders import FOLDER
from belayer.sandbox.manifest import read_manifest
from belayer.sandbox.owner import Owner
from belayer.sandbox.removal import remove_tree
from belayer.sandbox.scan import Scan

DEFAULT = "/var/lib/belayer"
POLL_S = 0.01
DISCARDED = "discarded"
"""Marks a checkpoint that is to be removed once nobody uses it."""
log = structlog.get_logger("belayer.sandbox")


def default_home() -> Path:
    """$BELAYER_HOME, or /var/lib/belayer."""
    return Path(os.environ.get("BELAYER_HOME") or DEFAULT)


class Home:
    """Paths and locks below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.criu = self.root / "criu"
        self._run = self.root / "run"
        self._checkpoints = self.root / "checkpoints"
        self._blobs = self.root / "blobs"
        self.blobs = Blobs(self._blobs)

    def make(self) -> None:
        """Make the folders that are missing. OSError when that is not allowed."""
        for folder in (self._run, self._checkpoints, self._blobs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    # --- containers ---

    def run_folder(self, incarnation: str) -> Path:
        return self._run / ids.checked_made_name(incarnation)

    def control_folder(self, incarnation: str) -> Path:
        """In a folder of its own, on which a tmpfs is mounted (`mount_bounded`)."""
        return self.run_folder(incarnation) / "shared" / "control"

    def restore_folder(self, incarnation: str) -> Path:
        """Logs and the lazy-pages daemon of the restore that made the container, if one did."""
        return self.run_folder(incarnation) / "restore"

    def make_run_folder(self, incarnation: str, owner: Owner) -> None:
        """A fresh one, owned before its container is made. FileExistsError when there is one."""
        self.run_folder(incarnation).mkdir(mode=0o700)
        self.set_owner(incarnation, owner)

    def owner(self, incarnation: str) -> Owner | None:
        """None when there is no folder, or one that was just begun."""
        with suppress(OSError, msgspec.MsgspecError):
            return Owner.decode((self.run_folder(incarnation) / "owner").read_bytes())
        return None

    def set_owner(self, incarnation: str, owner: Owner) -> None:
        """OSError when the folder is gone."""
        _replace(self.run_folder(incarnation) / "owner", owner.encode())

    def hand_over(self, spare: str, incarnation: str, owner: Owner) -> bool:
        """Give a spare container's folder to an incarnation. False when somebody else was faster."""
        try:
            self.run_folder(spare).rename(self.run_folder(incarnation))
        except FileNotFoundError:
            return False
        self.set_owner(incarnation, owner)
        return True

    def captured(self, incarnation: str) -> Captured | None:
        """What was captured last of the container; None when nothing was, or it cannot be read."""
        with suppress(OSError, msgspec.MsgspecError):
            return Captured.decode((self.run_folder(incarnation) / "captured").read_bytes())
        return None

    def set_captured(self, incarnation: str, captured: Captured) -> None:
        """OSError when the folder is gone."""
        _replace(self.run_folder(incarnation) / "captured", captured.encode())

    def run_folders(self) -> list[str]:
        """Incarnations that have a folder here, whether or not a container goes with it."""
        with suppress(FileNotFoundError):
            return sorted(entry.name for entry in os.scandir(self._run) if entry.is_dir(follow_symlinks=False))
        return []

    @contextmanager
    def locked(self, incarnation: str, timeout_s: float) -> Iterator[int]:
        """Hold the incarnation's lock; its descriptor. TimeoutError: another holds it. FileNotFoundError: no folder."""
        fd = os.open(self.run_folder(incarnation), FOLDER)
        try:
            deadline = time.monotonic() + timeout_s
            while not _try_lock(fd):
                if time.monotonic() >= deadline:
                    raise TimeoutError
                time.sleep(POLL_S)
            yield fd
        finally:
            os.close(fd)

    def remove_run_folder(self, incarnation: str) -> None:
        """Nothing there is fine. OSError when something in it cannot be removed."""
        remove_tree(self.run_folder(incarnation))

    # --- checkpoints ---

    def checkpoint(self, name: str) -> Path:
        return self._checkpoints / ids.checked_made_name(name)

    def published(self) -> list[str]:
        """All published checkpoints but those whose removal waits for a user."""
        with suppress(FileNotFoundError):
            return sorted(
                entry.name
                for entry in os.scandir(self._checkpoints)
                if not entry.name.startswith(".") and not (Path(entry.path) / DISCARDED).exists()
            )
        return []

    @contextmanager
    def partial(self, name: str) -> Iterator[Path]:
        """A folder to make a checkpoint in. Unless it is published in here it is removed at the end."""
        folder = self._checkpoints / f".partial-{ids.checked_made_name(name)}-{ids.new_suffix()}"
        folder.mkdir(mode=0o700)
        fd = os.open(folder, FOLDER)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield folder
        finally:
            _remove_or_leave(folder)
            os.close(fd)

    def publish(self, folder: Path, name: str, keys: Keys, fresh: Scan) -> int:
        """Make what is in the folder durable, then visible under its name, at once. OSError when the name is taken.

        `fresh`: its files that were copied for it; those that other checkpoints have too are shared, as `keys` calls
        them. Returns how many bytes the others take on the disk.
        """
        new, saved_bytes = self.blobs.share(folder, keys, fresh)
        _sync_file_system(folder)
        published = self.checkpoint(name)
        folder.rename(published)
        try:
            _fsync(self._checkpoints)
        except OSError:
            self.remove_checkpoint(name)  # now, or when `partial` has let go of it
            raise
        self.blobs.add(published, new)
        return sum({found.st_ino: found.st_blocks * 512 for found in fresh.values()}.values()) - saved_bytes

    @contextmanager
    def in_use(self, name: str) -> Iterator[None]:
        """Keep the checkpoint's files until the end, whoever removes it meanwhile. None there is fine.

        Several may use one. The last of them finishes a removal that had to wait.
        """
        try:
            fd = os.open(self.checkpoint(name), FOLDER)
        except FileNotFoundError:
            yield
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            yield
        finally:
            os.close(fd)
            if (self.checkpoint(name) / DISCARDED).exists():
                self.remove_checkpoint(name)

    def remove_checkpoint(self, name: str) -> None:
        """First out of sight, then off the disk. One that is in use is only marked. Nothing there is fine."""
        folder = self.checkpoint(name)
        with suppress(FileNotFoundError):
            (folder / DISCARDED).touch(mode=0o600)
            gone = self._checkpoints / f".removed-{name}-{ids.new_suffix()}"
            fd = os.open(folder, FOLDER)
            try:
                if not _try_lock(fd):
                    return
                folder.rename(gone)
            finally:
                os.close(fd)
            self._remove_removed(gone)

    def remove_leftovers(self) -> list[str]:
        """Remove what dead makers, users and removers left; the names of what was found. What cannot be is logged."""
        found = []
        for folder in self._checkpoints.iterdir() if self._checkpoints.is_dir() else ():
            try:
                if self._remove_leftover(folder):
                    found.append(folder.name)
            except OSError as error:
                _warn(folder, error)
        self.blobs.sweep()
        return found

    def _remove_leftover(self, folder: Path) -> bool:
        """Whether the folder is one."""
        if folder.name.startswith(".removed-"):
            self._remove_removed(folder)
        elif folder.name.startswith(".partial-") and _is_free(folder):
            _remove_or_leave(folder)
        elif not folder.name.startswith(".") and (folder / DISCARDED).exists():
            self.remove_checkpoint(folder.name)
        else:
            return False
        return True

    def _remove_removed(self, folder: Path) -> None:
        manifest = None
        with suppress(RestoreFailedError):
            manifest = read_manifest(folder)
        held = self.blobs.held_by(folder, manifest)
        if _remove_or_leave(folder):
            self.blobs.drop(held)


def _remove_or_leave(folder: Path) -> bool:
    """Whether the folder is gone. One that stays hurts nothing but the disk, so nobody's work ends for it."""
    try:
        remove_tree(folder)
    except OSError as error:
        _warn(folder, error)
        return False
    return True


def _warn(folder: Path, error: OSError) -> None:
    """It is tried again whenever leftovers are removed."""
    log.warning("a leftover cannot be removed; remove it by hand", folder=str(folder), error=str(error))


def _replace(path: Path, data: bytes) -> None:
    """By rename: a reader sees the old contents or the new."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(data)
    new.rename(path)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_free(folder: Path) -> bool:
    try:
        fd = os.open(folder, FOLDER)
    except OSError:
        return False
    try:
        # A maker holds the lock an instant after it has made the folder: one that young is left alone.
        return time.time() - os.fstat(fd).st_mtime > 1.0 and _try_lock(fd)
    finally:
        os.close(fd)


def _fsync(folder: Path) -> None:
    fd = os.open(folder, FOLDER)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_file_system(folder: Path) -> None:
    """syncfs(2): one call for a layer of many files. OSError when the disk could not take it."""
    fd = os.open(folder, FOLDER)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    finally:
        os.close(fd)
