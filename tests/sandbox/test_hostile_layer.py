"""Layers that a container made to hurt: wide, deep, and changing kind while they are looked at."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from belayer.errors import CheckpointRefusedError
from belayer.sandbox import layer as layers
from belayer.sandbox.apply import apply
from belayer.sandbox.captured import Captured, digest_of
from belayer.sandbox.home import Home
from belayer.sandbox.layer import LayerCapture, fill
from belayer.sandbox.limits import Step, unbounded
from belayer.sandbox.scan import TooDeepError, copy_entry
from belayer.sandbox.usage import disk
from tests.sandbox.conftest import Bench
from tests.sandbox.test_removal import deepen, descriptors, names

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="layers belong to root")
DESCRIPTORS = 200
DEEPER = "python3 -c \"import os\nfor _ in range({}): os.mkdir('d'); os.chdir('d')\""


def capture(upper: Path, target: Path) -> Captured:
    target.mkdir()
    with LayerCapture(upper, target) as captured:
        captured.prepare()
        captured.settle(())
        return captured.finish(target.name)


def make_wide(upper: Path) -> None:
    for number in range(600):
        (upper / "wide" / f"folder-{number}").mkdir(parents=True)
        (upper / "wide" / f"folder-{number}" / "file").touch()


def make_deep(upper: Path) -> None:
    deepen(upper, 1200)
    deepen(upper / "d", 100, name="another")


@pytest.mark.parametrize("make", [make_wide, make_deep])
def test_a_wide_or_deep_layer_needs_few_descriptors(emptied: Path, make: Callable[[Path], None]) -> None:
    for folder in ("upper", "filled", "applied"):
        (emptied / folder).mkdir()
    make(emptied / "upper")
    home = Home(emptied / "home")
    home.make()
    with descriptors(DESCRIPTORS):
        captured = capture(emptied / "upper", home.checkpoint("c"))
        fill(home.checkpoint("c"), emptied / "filled")
        apply(home.checkpoint("c"), emptied / "applied")
        for folder in ("upper", "filled", "applied"):
            assert digest_of(emptied / folder) == captured.digest
        assert disk(home).checkpoints["c"].bytes == captured.size_bytes
        home.remove_checkpoint("c")
    assert names(emptied / "home" / "checkpoints") == []


def test_a_path_too_long_is_refused_at_the_first_look(emptied: Path) -> None:
    (emptied / "upper").mkdir()
    deepen(emptied / "upper", 17, name="n" * 255)
    with pytest.raises(TooDeepError, match=r"4,\d\d\d bytes long, more than the 4,095 that are kept: /nnn"):
        capture(emptied / "upper", emptied / "capture")


@pytest.mark.sandbox
async def test_a_deep_layer_is_restored_and_one_too_deep_is_refused(bench: Bench) -> None:
    live = await bench.create()
    await live.sh(DEEPER.format(300))
    back = await live.kill_and_restore(await live.checkpoint())
    assert await back.sh("find . -type d | wc -l") == "301\n"
    await back.sh(DEEPER.replace("'d'", "250 * 'n'").format(17))
    with pytest.raises(CheckpointRefusedError, match=r"4,\d\d\d bytes long, more than the 4,095 .*: /testbed/nnn"):
        await back.checkpoint()
    await back.sh("rm -r d n*")
    again = await back.kill_and_restore(await back.checkpoint())
    assert await again.sh("ls") == ""


def become_file(path: Path) -> None:
    path.write_text("contents")


def become_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


KINDS: dict[str, Callable[[Path], None]] = {
    "file": become_file,
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to("elsewhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "socket": become_socket,
    "fifo": os.mkfifo,
    "device": lambda path: os.mknod(path, 0o020600, os.makedev(1, 3)),
    "nothing": lambda path: None,
}


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("before", ["file", "folder", "link"])
@pytest.mark.parametrize("after", KINDS)
def test_what_becomes_another_kind_while_it_is_copied_is_left_to_the_second_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    upper, target = tmp_path / "u", tmp_path / "t"
    for folder in (upper, target, upper / "inside"):
        folder.mkdir()
    changing = [upper / "x", upper / "inside" / "x"]
    for path in changing:
        KINDS[before](path)
    real = layers.scan

    def scan_and_change(root: int, moving: bool = False) -> dict[bytes, os.stat_result]:
        found = real(root, moving=moving)
        if moving:
            for path in changing:
                remove(path)
                KINDS[after](path)
        return found

    monkeypatch.setattr(layers, "scan", scan_and_change)
    with LayerCapture(upper, target) as captured:
        captured.prepare()
        captured.settle(())
        captured.finish("t")
    assert digest_of(target) == digest_of(upper)


def test_a_folder_whose_copy_was_given_up_is_copied_again_with_all_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upper, target = tmp_path / "u", tmp_path / "t"
    (upper / "folder").mkdir(parents=True)
    (upper / "folder" / "file").write_text("contents")
    target.mkdir()
    real = copy_entry

    def lost(source: int, into: int, name: bytes, found: os.stat_result, step: Step = unbounded) -> bool:
        return real(source, into, name, found, step) and name != b"folder"

    with LayerCapture(upper, target) as captured:
        monkeypatch.setattr(layers, "copy_entry", lost)
        captured.prepare()
        monkeypatch.setattr(layers, "copy_entry", real)
        captured.settle(())
    assert (target / "folder" / "file").read_text() == "contents"


def test_a_full_disk_is_no_race(tmp_path: Path) -> None:
    (tmp_path / "upper").mkdir()
    (tmp_path / "upper" / "file").write_bytes(bytes(1 << 20))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            capture(tmp_path / "upper", tmp_path / "capture")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
