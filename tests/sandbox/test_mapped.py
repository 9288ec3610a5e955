"""A write through a mapping may leave no trace: no file that is mapped is believed, whatever it looks like."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer.sandbox.captured import Captured
from belayer.sandbox.layer import LayerCapture
from belayer.sandbox.mapped import mapped_inodes
from tests.sandbox.conftest import Bench

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="layers belong to root")
BYTES = 8192


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Path]:
    """A folder with an overlay mounted at `merged`, over an image with two files, one of which has two names."""
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    for name in ("image", "linked"):
        (tmp_path / "lower" / name).write_bytes(bytes(BYTES))
    (tmp_path / "lower" / "twin").hardlink_to(tmp_path / "lower" / "linked")
    options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(tmp_path / "merged")], check=True)
    yield tmp_path
    subprocess.run(["umount", str(tmp_path / "merged")], check=True)


def devices_of(overlay: Path) -> set[int]:
    return {(overlay / name).stat().st_dev for name in ("upper", "merged")}


class Captures:
    """Captures of the overlay's layer, one after the other, of what this process may have mapped."""

    def __init__(self, overlay: Path) -> None:
        self.overlay = overlay
        self.last: tuple[Captured, Path] | None = None
        self.count = 0

    def take(self, meanwhile=lambda: None) -> Path:
        self.count += 1
        target = self.overlay / f"capture-{self.count}"
        target.mkdir()
        devices = devices_of(self.overlay)
        with LayerCapture(
            self.overlay / "upper", target, *(self.last or (None, None)), self.overlay / "merged"
        ) as layer:
            layer.prepare(lambda: mapped_inodes([os.getpid()], devices))
            meanwhile()
            layer.settle(mapped_inodes([os.getpid()], devices))
            self.last = (layer.finish(target.name), target)
        return target


@pytest.mark.parametrize("name", ["image", "linked", "made here"])
@pytest.mark.parametrize("moved", [False, True], ids=["under its name", "renamed by a hard link"])
def test_files_of_the_image_too(overlay: Path, name: str, moved: bool) -> None:
    path, now = overlay / "merged" / name, name
    if name == "made here":
        path.write_bytes(bytes(BYTES))
    captures = Captures(overlay)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), BYTES) as view:
        view[0] = 1  # the page is dirty and writable from here on
        if moved:
            now = "another name"
            (overlay / "merged" / now).hardlink_to(path)
            path.unlink()
        first = captures.take(meanwhile=lambda: view.__setitem__(0, 2))
        assert (first / now).read_bytes()[0] == 2
        view[0] = 3
    assert (overlay / "merged" / now).stat().st_ino not in mapped_inodes([os.getpid()], devices_of(overlay))
    assert (captures.take() / now).read_bytes()[0] == 3


def test_only_what_is_mapped_is_copied_again(overlay: Path) -> None:
    for name in ("image", "linked", "other"):
        (overlay / "merged" / name).write_bytes(b"1" * BYTES)
    captures = Captures(overlay)
    with (overlay / "merged" / "image").open("r+b") as file, mmap.mmap(file.fileno(), BYTES):
        first, second = captures.take(), captures.take()
    same = {name for name in ("image", "linked", "other") if (first / name).samefile(second / name)}
    assert same == {"linked", "other"}


SCRIPT = """
import ctypes, mmap, os, sys, threading
file = open(sys.argv[1], "r+b")
view = mmap.mmap(file.fileno(), 0)
view[0] = 1
{how}
"""
WAYS = {
    "made read-only for now": "at = ctypes.addressof(ctypes.c_char.from_buffer(view))\n"
    "ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), len(view), 1)\nprint('up', flush=True); sys.stdin.read()",
    "the first thread has ended": "threading.Thread(target=lambda: (print('up', flush=True), sys.stdin.read()))"
    ".start()\nctypes.CDLL(None).syscall({exit}, 0)",
}


@pytest.mark.parametrize("way", WAYS)
def test_whatever_the_process_looks_like(overlay: Path, way: str) -> None:
    how = WAYS[way].format(exit=60 if os.uname().machine == "x86_64" else 93)
    command = [sys.executable, "-c", SCRIPT.format(how=how), str(overlay / "merged" / "image")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        found = mapped_inodes([process.pid], devices_of(overlay))
        process.kill()
    assert (overlay / "merged" / "image").stat().st_ino in found


WRITER = """
import mmap, os, sys
file = open(sys.argv[1], "r+b")
view = mmap.mmap(file.fileno(), 0)
count = 0
while True:
    count += 1
    view[0:8] = b"%08d" % count
    if count == 1:
        open("up", "w").close()
"""


@pytest.mark.sandbox
@pytest.mark.parametrize("file", ["/etc/bash.bashrc", "/testbed/new"])
async def test_a_file_that_never_rests_is_captured_as_it_was_in_the_freeze(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    live = await bench.create()
    await live.sh(f"[ -e {file} ] || cp /etc/bash.bashrc {file}; cat > writer.py <<'END'\n{WRITER}\nEND")
    await live.sh(f"python3 writer.py {file} & until [ -e up ]; do sleep 0.01; done")
    frozen = []
    settle = LayerCapture.settle

    def settle_and_look(self: LayerCapture, mapped: set[int]) -> int:
        done = settle(self, mapped)
        frozen.append(Path(f"/proc/{live.incarnation.pid}/root{file}").read_bytes()[:8])
        return done

    with monkeypatch.context() as patch:
        patch.setattr(LayerCapture, "settle", settle_and_look)
        names = [await live.checkpoint() for _ in range(2)]
    saved = [(bench.host.checkpoint_path(name) / "layer" / file[1:]).read_bytes()[:8] for name in names]
    assert saved == frozen
    await live.sh("pkill -f '[w]riter.py'; while pgrep -f '[w]riter.py'; do sleep 0.01; done")
    truth = await live.sh(f"head -c 8 {file}")
    back = await live.kill_and_restore(await live.checkpoint())
    assert await back.sh(f"head -c 8 {file}") == truth
