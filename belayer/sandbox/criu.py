"""CRIU, spoken to over its RPC (`criu swrk`), with the messages of pycriu. Imported only when first needed.

A worker is started ahead, so that its start does not count while a container is frozen. One worker serves one request.
When a worker is killed, the kernel lets go of the processes that it held, and nearly always they go on as if nothing
had been; but one in which CRIU was just running a system call of its own dies of it. So a worker is killed only when it
would wait for ever, and the kernel's out-of-memory killer is asked to look elsewhere.

Source of the dump's options: runc 1.1, libcontainer/container_linux.go, Checkpoint, whose restore reads the images.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from belayer.errors import HostUnfitError, SandboxError
from belayer.sandbox.pagemap import Messages

MINIMUM_VERSION = (4, 2)
REPLY_BYTES = 1 << 16
LOOK_EVERY_S = 0.05
LOG_FILE = "dump.log"
PAGES_READY = "status-ready"
"""CRIU has dumped everything and would now serve pages."""
CLONE_NEWNET = 0x40000000
GHOST_LIMIT_BYTES = 2 << 30
"""Deleted files that a process still has open are kept in the images up to this size."""


class CriuError(Exception):
    """CRIU refused, failed or died; the text is the end of its log. Internal: the sandbox turns it into its own."""


@dataclass(frozen=True, slots=True)
class Target:
    """A container's processes, as CRIU must know them."""

    pid: int
    root: Path
    freezer: Path
    external_mounts: Mapping[str, str]
    """Mount points in the container that are not part of the images, and their names there."""
    watched: Sequence[str]
    """Folders in the container where files that inotify watches may be."""


class Criu:
    """The CRIU of one folder: `criu` and `python/pycriu` in it."""

    def __init__(self, folder: Path) -> None:
        self._binary = folder / "criu"
        self._python = folder / "python"
        self._messages: ModuleType | None = None

    def check(self) -> tuple[int, int]:
        """Its version. HostUnfitError when it is missing, too old or without pycriu."""
        remedy = "run `scripts/criu.sh` (or `make setup`), which puts a current CRIU there"
        try:
            done = subprocess.run([self._binary, "--version"], capture_output=True, timeout=20, check=False, text=True)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise HostUnfitError("CRIU", f"{self._binary} cannot be run ({error})", remedy) from None
        words = done.stdout.split()
        try:
            major, minor = (int(part) for part in words[words.index("Version:") + 1].split(".")[:2])
        except (ValueError, IndexError):
            raise HostUnfitError("CRIU", f"{self._binary} does not say its version", remedy) from None
        if (major, minor) < MINIMUM_VERSION:
            needed = ".".join(map(str, MINIMUM_VERSION))
            raise HostUnfitError("CRIU", f"version {major}.{minor} is too old, {needed} is needed", remedy)
        self.messages()
        return major, minor

    @cached_property
    def version(self) -> tuple[int, int]:
        return self.check()

    def messages(self) -> ModuleType:
        """The module pycriu.rpc_pb2. HostUnfitError when it cannot be imported."""
        if self._messages is None:
            if str(self._python) not in sys.path:
                sys.path.append(str(self._python))
            try:
                import pycriu.rpc_pb2 as messages  # type: ignore[import-not-found]
            except ImportError as error:
                remedy = "run `scripts/criu.sh` (or `make setup`), and install Belayer with its extra `sandbox`"
                raise HostUnfitError("pycriu", f"it cannot be imported ({error})", remedy) from None
            self._messages = messages
        return self._messages

    def image_messages(self) -> Messages:
        """The messages of memory images. HostUnfitError when pycriu cannot be imported."""
        self.messages()
        from pycriu.images import mm_pb2, pagemap_pb2  # type: ignore[import-not-found]

        return _ImageMessages(pagemap_pb2.pagemap_head, pagemap_pb2.pagemap_entry, mm_pb2.mm_entry)

    def worker(self, keep_open: Sequence[int] = ()) -> Worker:
        """A CRIU process that waits for its request. It holds the given descriptors open until it ends."""
        return Worker(self._binary, self.messages(), keep_open)


@dataclass(frozen=True, slots=True)
class _ImageMessages:
    pagemap_head: Any
    pagemap_entry: Any
    mm_entry: Any


class Worker:
    """One `criu swrk` process; a context manager that leaves none behind."""

    def __init__(self, binary: Path, messages: Any, keep_open: Sequence[int]) -> None:
        self._messages = messages
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [binary, "swrk", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *keep_open],
                start_new_session=True,
            )
        with suppress(OSError):
            Path(f"/proc/{self._process.pid}/oom_score_adj").write_text("-900")

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        try:
            self._process.wait(0.5 if kind is None else 0.0)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait(10)

    def kill(self) -> None:
        """SIGKILL; what waits for the worker's answer sees it end."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)

    def dump(
        self,
        target: Target,
        images: Path,
        timeout_s: float,
        when_ready: Callable[[], object],
        before_release: Callable[[], object],
        still_wanted: Callable[[], str | None],
        without_memory: bool = False,
    ) -> None:
        """Dump the processes into the folder `images` and leave them as they were; thawing them is the caller's.

        `when_ready` is called when CRIU has made its preparations, and freezes them (CRIU itself would look only every
        0.1 s whether it is done); `before_release` is called when all is dumped and they are still held. An OSError or
        SandboxError of theirs ends the dump and is raised again. `still_wanted` is asked now and then; a
        reason that it returns ends the dump. (A held process that is killed cannot die, and CRIU would wait for it:
        somebody has to look.) CriuError, with its log, when CRIU does not do it.

        `without_memory`: private anonymous pages are named in the pagemaps and left to the caller, who copies them in
        `before_release` at the latest. CRIU would serve them to somebody then; it is told not to, which it calls a
        failure, and lets go of the processes.
        """
        steps = {"pre-dump": when_ready, "post-dump": before_release}
        folder = os.open(images, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            request = self._messages.criu_req(type=self._messages.DUMP)
            options = request.opts
            options.images_dir_fd = folder
            options.pid = target.pid
            options.root = str(target.root)
            options.leave_running = True
            options.notify_scripts = True
            options.tcp_established = True
            options.ext_unix_sk = True
            options.file_locks = True
            options.link_remap = True
            options.force_irmap = True  # inotify: watched files are found by name
            options.irmap_scan_paths.extend(target.watched)
            options.orphan_pts_master = True
            options.manage_cgroups = True
            options.manage_cgroups_mode = self._messages.SOFT
            options.empty_ns = CLONE_NEWNET  # Docker makes it again: lo, up, and nothing else
            options.network_lock = self._messages.SKIP  # no interface but lo: nothing arrives meanwhile
            options.freeze_cgroup = str(target.freezer)
            options.ghost_limit = GHOST_LIMIT_BYTES
            options.lazy_pages = without_memory
            options.log_level = 2
            options.log_file = LOG_FILE
            options.timeout = max(1, int(timeout_s))
            for mount, name in target.external_mounts.items():
                options.ext_mnt.add(key=mount, val=name)
            (images / "descriptors.json").write_text(json.dumps(_standard_descriptors(target.pid)))
            self._talk(request, images, timeout_s, steps, still_wanted)
        finally:
            os.close(folder)

    def _talk(
        self,
        request: Any,
        images: Path,
        timeout_s: float,
        steps: Mapping[str, Callable[[], object]],
        still_wanted: Callable[[], str | None],
    ) -> None:
        failure: Exception | None = None
        enough = False
        try:
            self._socket.send(request.SerializeToString())
            while (reply := self._receive(timeout_s, still_wanted)).type == self._messages.NOTIFY:
                if reply.notify.script in steps:
                    failure = _failure_of(steps[reply.notify.script])
                enough = reply.notify.script == PAGES_READY
                success = failure is None and not enough
                answer = self._messages.criu_req(type=self._messages.NOTIFY, notify_success=success)
                self._socket.send(answer.SerializeToString())
        except OSError as error:
            raise CriuError(f"CRIU ended ({error}){errors_in(images / LOG_FILE)}") from None
        except BaseException:
            self.kill()
            raise
        if failure is not None:
            raise failure
        if not enough and (reply.type != request.type or not reply.success):
            raise CriuError(f"CRIU failed{errors_in(images / LOG_FILE)}")

    def _receive(self, timeout_s: float, still_wanted: Callable[[], str | None]) -> Any:
        deadline = time.monotonic() + timeout_s
        self._socket.settimeout(LOOK_EVERY_S)
        while True:
            with suppress(TimeoutError):
                data = self._socket.recv(REPLY_BYTES)
                if not data:
                    raise OSError("it closed the connection")
                return self._messages.criu_resp.FromString(data)
            if (reason := still_wanted()) is not None:
                raise CriuError(reason)
            if time.monotonic() > deadline:
                raise CriuError(f"CRIU did not answer within {timeout_s:.0f} s")


def _failure_of(step: Callable[[], object]) -> Exception | None:
    """CRIU must hear of a failure, and let go of the processes, before the caller does."""
    try:
        step()
    except (OSError, SandboxError) as error:
        return error
    return None


def _standard_descriptors(pid: int) -> list[str]:
    """What runc's restore wants to know: which pipes process 1 had as its standard streams."""
    return [str(Path(f"/proc/{pid}/fd/{fd}").readlink()) for fd in range(3)]


def errors_in(log: Path) -> str:
    """The first errors in a log of CRIU's, as the end of a sentence; empty when it has none."""
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
        lines = [line for line in lines if "RLIMIT_NOFILE" not in line]  # said wherever CAP_SYS_RESOURCE is missing
    except OSError:
        return ""
    return ": " + "; ".join(lines[:3]) if lines else ""
