"""Layers as folders, without Docker: a capture equals its original, whatever happens between its two looks."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belayer.sandbox.apply import apply
from belayer.sandbox.captured import Captured, digest_of, rebase
from belayer.sandbox.layer import LayerCapture, fill
from belayer.sandbox.mapped import mapped_inodes

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="layers belong to root")


def same(one: Path, two: Path) -> bool:
    return one.samefile(two)


class Layer:
    """A layer and the captures of it so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.upper = folder / "upper"
        self.upper.mkdir()
        self.last: tuple[Captured, Path] | None = None
        self.count = 0

    def capture(self, meanwhile=lambda: None, mapped=()) -> Path:
        """Both looks, with something done in between; the captured folder."""
        self.count += 1
        target = self.folder / f"capture-{self.count}"
        target.mkdir()
        with LayerCapture(self.upper, target, *(self.last or (None, None))) as capture:
            capture.prepare()
            meanwhile()
            capture.settle(mapped)
            self.last = (capture.finish(target.name), target)
        assert self.last[0].digest == digest_of(target), "the digest that was put together is that of every byte"
        return target


@pytest.fixture
def layer(tmp_path: Path) -> Layer:
    return Layer(tmp_path)


def test_unchanged_files_are_shared_and_changed_ones_are_not(layer: Layer) -> None:
    (layer.upper / "same").write_text("same")
    (layer.upper / "grows").write_text("1")
    first = layer.capture()
    (layer.upper / "grows").write_text("12")
    second = layer.capture()
    assert same(first / "same", second / "same")
    assert (first / "grows").read_text() == "1"
    assert (second / "grows").read_text() == "12"
    assert digest_of(second) == digest_of(layer.upper)


@pytest.mark.parametrize("change", ["contents", "mtime", "xattr", "mode", "owner"])
def test_the_smallest_change_is_seen(layer: Layer, change: str) -> None:
    path = layer.upper / "file"
    path.write_text("a")
    before = path.stat()
    first = layer.capture()
    match change:
        case "contents":
            path.write_text("b")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        case "mtime":
            os.utime(path, (1, 2))
        case "xattr":
            os.setxattr(path, "user.mark", b"x")
        case "mode":
            path.chmod(0o4711)
        case _:
            os.chown(path, 5, 6)
    second = layer.capture() / "file"
    assert not same(first / "file", second)
    now = path.stat()
    assert second.read_text() == path.read_text()
    assert os.listxattr(second) == os.listxattr(path)
    for field in ("st_mode", "st_uid", "st_gid", "st_mtime_ns"):
        assert getattr(second.stat(), field) == getattr(now, field)


def test_a_write_through_a_mapping_is_never_missed(layer: Layer) -> None:
    path = layer.upper / "mapped"
    path.write_bytes(bytes(8192))
    inode = path.stat().st_ino
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8192) as view:
        view[0] = 1  # the page is dirty and writable from here on: no later write moves the ctime
        assert inode in mapped_inodes([os.getpid()])
        first = layer.capture(mapped={inode}, meanwhile=lambda: view.__setitem__(0, 2))
        assert (first / "mapped").read_bytes()[0] == 2
        view[0] = 3
    assert inode not in mapped_inodes([os.getpid()])
    assert (layer.capture() / "mapped").read_bytes()[0] == 3


def test_the_layers_own_folder_is_as_it_was_in_the_freeze(layer: Layer, tmp_path: Path) -> None:
    os.setxattr(layer.upper, "user.mark", b"x")
    layer.upper.chmod(0o2711)
    target = tmp_path / "target"
    target.mkdir()
    with LayerCapture(layer.upper, target) as capture:
        capture.prepare()
        capture.settle(())
        layer.upper.chmod(0o777)
        os.setxattr(layer.upper, "user.mark", b"later")
        capture.finish("c")
    assert target.stat().st_mode & 0o7777 == 0o2711
    assert os.getxattr(target, "user.mark") == b"x"


def test_hard_links_stay_one_file(layer: Layer) -> None:
    (layer.upper / "a").write_text("x")
    os.link(layer.upper / "a", layer.upper / "b")
    first = layer.capture()
    assert same(first / "a", first / "b")
    (layer.upper / "b").unlink()
    (layer.upper / "b").write_text("x")
    second = layer.capture()
    assert not same(second / "a", second / "b")
    (layer.upper / "c").hardlink_to(layer.upper / "a")
    third = layer.capture()
    assert same(third / "a", third / "c")
    assert not same(third / "a", third / "b")


def test_links_that_lead_out_are_not_followed(layer: Layer, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    inside = layer.upper / "folder"
    inside.mkdir()
    (inside / "secret").write_text("mine")

    def swap() -> None:
        shutil.rmtree(inside)
        inside.symlink_to(outside)

    captured = layer.capture(meanwhile=swap)
    assert (captured / "folder").is_symlink()
    assert (outside / "secret").read_text() == "secret"
    other = tmp_path / "other"
    other.mkdir()
    fill(captured, other)
    assert (other / "folder").readlink() == outside


def test_names_holes_and_special_files(layer: Layer) -> None:
    (layer.upper / os.fsdecode(b"new\nline \xff")).write_text("odd")
    with (layer.upper / "sparse").open("wb") as file:
        file.truncate(1 << 42)
        file.seek(1 << 29)
        file.write(b"end")
    os.mkfifo(layer.upper / "fifo")
    os.mknod(layer.upper / "whiteout", 0o020000)
    (layer.upper / "opaque").mkdir()
    os.setxattr(layer.upper / "opaque", "trusted.overlay.opaque", b"y")
    captured = layer.capture()
    assert digest_of(captured) == digest_of(layer.upper)
    assert (captured / "sparse").stat().st_blocks == (layer.upper / "sparse").stat().st_blocks
    assert (captured / "whiteout").stat().st_rdev == 0
    assert (captured / "whiteout").is_char_device()


def test_an_earlier_capture_that_is_gone_is_done_without(layer: Layer) -> None:
    (layer.upper / "file").write_text("x")
    shutil.rmtree(layer.capture())
    assert (layer.capture() / "file").read_text() == "x"


def test_a_restored_layer_shares_with_what_it_came_from(layer: Layer, tmp_path: Path) -> None:
    (layer.upper / "file").write_text("x")
    (layer.upper / "folder").mkdir()
    first = layer.capture()
    assert layer.last is not None
    (tmp_path / "again").mkdir()
    again = Layer(tmp_path / "again")
    fill(first, again.upper)
    again.last = (rebase(again.upper, layer.last[0]), first)
    assert same(again.capture() / "file", first / "file")


def test_applied_to_a_tree_it_makes_what_overlay_would_show(layer: Layer, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("removed/deep", "replaced", "opaque", "kept"):
        (root / name).mkdir(parents=True)
        (root / name / "old").write_text("old")
    (root / "file").write_text("old")
    os.mknod(layer.upper / "removed", 0o020000)
    (layer.upper / "replaced").write_text("now a file")
    (layer.upper / "opaque").mkdir()
    os.setxattr(layer.upper / "opaque", "trusted.overlay.opaque", b"y")
    (layer.upper / "opaque" / "new").write_text("new")
    (layer.upper / "kept").mkdir(mode=0o711)
    (layer.upper / "kept" / "new").write_text("new")
    (layer.upper / "kept" / "twin").hardlink_to(layer.upper / "kept" / "new")
    (layer.upper / "file").symlink_to("/etc/shadow")
    apply(layer.capture(), root)
    seen = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    assert seen == ["file", "kept", "kept/new", "kept/old", "kept/twin", "opaque", "opaque/new", "replaced"]
    assert same(root / "kept/new", root / "kept/twin")
    assert (root / "kept").stat().st_mode & 0o777 == 0o711
    assert (root / "file").readlink() == Path("/etc/shadow")


NAMES = st.sampled_from(["a", "b", "a/x", "a/y", "b/x", "a/d/z"])
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["write", "append", "remove", "folder", "link", "rename", "mode", "symlink"]), NAMES, NAMES
    ),
    max_size=8,
)


def change(root: Path, operation: str, name: str, other: str) -> None:
    """One operation, if it is possible just now."""
    path = root / name
    try:
        match operation:
            case "write":
                path.parent.mkdir(exist_ok=True)
                path.write_text(other)
            case "append":
                with path.open("a") as file:
                    file.write(other)
            case "remove":
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            case "folder":
                path.mkdir(parents=True)
            case "link":
                path.hardlink_to(root / other)
            case "rename":
                path.rename(root / other)
            case "mode":
                path.chmod(0o600 + len(other))
            case _:
                path.symlink_to(other)
    except OSError:
        return


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(CHANGES, CHANGES), min_size=1, max_size=4))
def test_any_history_is_captured_exactly(
    rounds: list[tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        layer = Layer(Path(folder))
        for before, meanwhile in rounds:
            for step in before:
                change(layer.upper, *step)
            captured = layer.capture(meanwhile=lambda steps=meanwhile: [change(layer.upper, *step) for step in steps])
            assert digest_of(captured) == digest_of(layer.upper)
            twins = {path for path in captured.rglob("*") if path.is_file() and not path.is_symlink()}
            for one in twins:
                for two in twins:
                    here = same(one, two)
                    assert here == same(
                        layer.upper / one.relative_to(captured), layer.upper / two.relative_to(captured)
                    )
