"""What a container puts in the place of its control folder's files: the host must not even open it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from belayer.errors import SandboxFailedError
from belayer.sandbox import control
from belayer.sandbox.answers import Last
from belayer.sandbox.folders import open_file, parent_of
from tests.waiting import until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root alone makes devices")
IN_OPEN = 0x20
ZERO = os.makedev(1, 5)


@contextmanager
def openings(path: Path) -> Iterator[list[int]]:
    """The masks of the events that the opening of an entry has made, at the end. inotify(7)."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(watch, os.fsencode(path), IN_OPEN) >= 0
    seen: list[int] = []
    try:
        yield seen
        with suppress(BlockingIOError):
            events = struct.iter_unpack("iIII", os.read(watch, 4096))
            seen.extend(mask for _, mask, _, _ in events if mask & IN_OPEN)
    finally:
        os.close(watch)


async def test_a_device_in_the_doorbells_place_is_not_opened(tmp_path: Path) -> None:
    folder = tmp_path / "control"
    control.make_folder(folder)
    channel = control.Channel("hostile", folder)
    doorbell = folder / control.DOORBELL
    doorbell.unlink()
    os.mknod(doorbell, 0o020600, ZERO)
    try:
        with openings(doorbell) as seen, pytest.raises(SandboxFailedError, match="control folder is unusable"):
            await channel.ask({"kind": "ping"}, Last, 3.0)
        assert seen == []
    finally:
        channel.close()


async def test_a_device_in_a_replys_place_is_not_opened(tmp_path: Path) -> None:
    folder = tmp_path / "control"
    control.make_folder(folder)
    channel = control.Channel("hostile", folder)
    device = folder / "device"
    os.mknod(device, 0o020600, ZERO)
    asked = asyncio.ensure_future(channel.ask({"kind": "ping"}, Last, 3.0))
    try:
        with openings(device) as seen:
            request = await until(lambda: next(folder.glob("request-*"), None))
            device.rename(folder / request.name.replace("request", "reply"))
            with pytest.raises(SandboxFailedError, match="control folder is unusable"):
                await asked
        assert seen == []
    finally:
        channel.close()


def test_a_regular_file_is_opened_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("contents")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")
    os.mknod(tmp_path / "device", 0o020600, ZERO)
    (tmp_path / "folder").mkdir()
    here = os.open(tmp_path, os.O_RDONLY)
    try:
        with os.fdopen(open_file(here, "file")) as file, openings(tmp_path / "file") as seen:
            assert file.read() == "contents"
            os.close(open_file(here, "file"))
        assert seen, "the test sees openings"
        for name in ("link", "fifo", "device", "folder"):
            with openings(tmp_path / name) as seen, pytest.raises(OSError, match="something else"):
                open_file(here, name)
            assert seen == [] or name == "link", "a link is watched where it leads"
        with pytest.raises(OSError, match="Not a directory"), parent_of(here, b"link/file"):
            pass
    finally:
        os.close(here)
