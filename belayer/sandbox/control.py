"""The host's end of a runner's control folder: requests out, replies in, and the runner's marker.

The folder's contents are the container's to write, hence hostile: names are opened as `folders.py` says, only a FIFO is
rung and only a regular file of bounded size is read. A runner that does not answer in time is a SandboxFailedError; so
is one whose answer makes no sense.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from belayer import ids
from belayer.errors import SandboxFailedError
from belayer.sandbox.answers import A, answer
from belayer.sandbox.folders import FOLDER, open_file, open_node

DOORBELL = "doorbell"
REPLY_LIMIT_BYTES = 256 << 20
SHARED_BYTES = 2 * REPLY_LIMIT_BYTES
"""All that may lie in the folder. It is in memory, and counts as the container's."""
LOOK_EVERY_S = 0.25
"""How often a waiting host looks whether a dead checkpointer has left the container frozen."""


def make_folder(folder: Path, action: int | None = None) -> None:
    """A fresh control folder. With an action: for a runner restored idle after that action."""
    folder.mkdir(mode=0o700, parents=True)
    os.mkfifo(folder / DOORBELL, 0o600)
    if action is not None:
        (folder / f"idle-{action}").touch(0o600)


def read_marker(folder: Path) -> tuple[str, int] | None:
    """The runner's state, ("idle" or "busy", last action); None when it has none (not started yet)."""
    for entry in os.scandir(folder):
        name = entry.name
        state, dash, number = name.partition("-")
        if dash and state in ("idle", "busy") and number.isdecimal():
            return state, int(number)
    return None


class Channel:
    """One client's conversation with the runner. Requests may overlap; each waits for its own reply."""

    def __init__(self, incarnation: str, folder: Path) -> None:
        """Raises SandboxFailedError when the folder or its doorbell is gone."""
        self._incarnation = incarnation
        self._client = ids.new_suffix()
        self._count = 0
        self._bell_name = f"bell-{self._client}"
        self._replied = asyncio.Event()
        try:
            self._folder = os.open(folder, FOLDER)
        except OSError as error:
            raise SandboxFailedError(incarnation, f"its control folder cannot be opened: {error}") from None
        try:
            os.mkfifo(self._bell_name, 0o600, dir_fd=self._folder)
            self._bell = self._open_fifo(self._bell_name, os.O_RDWR)
        except OSError as error:
            os.close(self._folder)
            raise SandboxFailedError(incarnation, f"its control folder cannot be written: {error}") from None
        asyncio.get_running_loop().add_reader(self._bell, self._rung)

    def close(self) -> None:
        """Let go; the runner is not told. Safe to repeat."""
        if self._bell < 0:
            return
        asyncio.get_running_loop().remove_reader(self._bell)
        os.close(self._bell)
        self._bell = -1
        self._unlink(self._bell_name)
        os.close(self._folder)

    async def ask(
        self,
        request: dict[str, Any],
        kind: type[A],
        timeout_s: float,
        while_waiting: Callable[[], object] | None = None,
    ) -> tuple[A, bytes]:
        """Send the request and return the answer, of this kind, and the output. `while_waiting` is called now and then.
        SandboxFailedError when there is none in time, or what there is makes no sense."""
        if self._bell < 0:
            raise SandboxFailedError(self._incarnation, "the sandbox object is closed")
        self._count += 1
        name = f"{self._client}-{self._count:06d}"
        body = json.dumps({**request, "id": name, "client": self._client}).encode()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            self._write(f"request-{name}", body)
            self._ring()
            while (reply := self._read_reply(f"reply-{name}")) is None:
                left = deadline - loop.time()
                if left <= 0:
                    raise SandboxFailedError(self._incarnation, f"its runner did not answer within {timeout_s:.1f} s")
                self._replied.clear()
                try:
                    await asyncio.wait_for(self._replied.wait(), min(left, LOOK_EVERY_S))
                except TimeoutError:
                    if while_waiting is not None:
                        while_waiting()
        except OSError as error:
            raise SandboxFailedError(self._incarnation, f"its control folder is unusable: {error}") from None
        finally:
            if self._bell >= 0:
                self._unlink(f"request-{name}")
                self._unlink(f"reply-{name}")
        head, output = reply
        return answer(self._incarnation, head, kind), output

    def _rung(self) -> None:
        os.read(self._bell, 4096)
        self._replied.set()

    def _open_fifo(self, name: str, flags: int) -> int:
        return open_node(self._folder, name, stat.S_ISFIFO, flags)

    def _ring(self) -> None:
        """A runner that does not listen yet looks for requests when it starts; one with a full doorbell will look."""
        try:
            doorbell = self._open_fifo(DOORBELL, os.O_WRONLY)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        with suppress(BlockingIOError):
            os.write(doorbell, b"!")
        os.close(doorbell)

    def _write(self, name: str, body: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(f"new-{name}", flags, 0o600, dir_fd=self._folder), "wb") as file:
            file.write(body)
        os.rename(f"new-{name}", name, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def _read_reply(self, name: str) -> tuple[bytes, bytes] | None:
        try:
            fd = open_file(self._folder, name)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            if os.fstat(fd).st_size > REPLY_LIMIT_BYTES:
                raise OSError(f"{name} is not a reply")
            head, _, output = file.read(REPLY_LIMIT_BYTES).partition(b"\n")
        return head, output

    def _unlink(self, name: str) -> None:
        with suppress(OSError):  # gone with the container's folder, or a directory that the container put there
            os.unlink(name, dir_fd=self._folder)
