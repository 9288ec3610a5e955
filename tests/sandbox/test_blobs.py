"""What checkpoints share, without Docker: folders as a capture makes them; processes that die between any steps."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from belayer.sandbox.blobs import SMALLEST_BYTES, image_path, keys_of, layer_path
from belayer.sandbox.home import Home
from belayer.sandbox.layer import LayerCapture, fill
from belayer.sandbox.manifest import (
    IMAGES,
    LAYER,
    LAYER_INDEX,
    Manifest,
    boot_id,
    read_manifest,
    sizes_and_digests,
    verify,
    write_manifest,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="layers belong to root")
BIG = SMALLEST_BYTES + 5000


class Trajectory:
    """A container's layer and images, and checkpoints of them as `capture.py` makes them."""

    def __init__(self, home: Home, folder: Path) -> None:
        self.home = home
        self.upper = folder / "upper"
        self.upper.mkdir(parents=True)
        self.name = folder.name
        home.run_folder(self.name).mkdir()
        self.images: dict[str, bytes] = {}

    def write(self, name: str, data: bytes, mode: int = 0o644, mtime_s: int = 1000) -> None:
        path = self.upper / name
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        path.chmod(mode)
        os.utime(path, (mtime_s, mtime_s))

    def publish(self, name: str) -> int:
        """How many bytes it took."""
        with self.home.partial(name) as folder:
            for part in (IMAGES, LAYER):
                (folder / part).mkdir()
            for image, data in self.images.items():
                (folder / IMAGES / image).write_bytes(data)
            known = self.home.captured(self.name)
            saved = None if known is None else self.home.checkpoint(known.checkpoint) / LAYER
            with LayerCapture(self.upper, folder / LAYER, known, saved) as layer:
                layer.prepare()
                layer.settle(())
                captured = layer.finish(name)
            (folder / LAYER_INDEX).write_bytes(captured.encode())
            images = sizes_and_digests((folder / IMAGES).iterdir())
            manifest = Manifest(
                checkpoint=name,
                run="r",
                trajectory="t",
                incarnation="i",
                action=1,
                image_digest="d",
                boot_id=boot_id(),
                created_at_s=0.0,
                frozen_s=0.0,
                noise="",
                traits="",
                mounts={},
                images=images,
                layer_entries=len(captured.entries),
                layer_bytes=captured.size_bytes,
                layer_digest=captured.digest,
            )
            write_manifest(folder, manifest)
            fresh = {layer_path(path): found for path, found in layer.fresh().items()}
            fresh |= {image_path(image): (folder / IMAGES / image).lstat() for image in images}
            stored_bytes = self.home.publish(folder, name, keys_of(layer.entries, captured, images), fresh)
        self.home.set_captured(self.name, captured)
        return stored_bytes


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.make()
    return made


@pytest.fixture
def two(home: Home, tmp_path: Path) -> tuple[Trajectory, Trajectory]:
    return Trajectory(home, tmp_path / "one"), Trajectory(home, tmp_path / "two")


def blobs(home: Home) -> dict[int, int]:
    """Inode -> links, of all blobs."""
    return {found.st_ino: found.st_nlink for found in (path.lstat() for path in (home.root / "blobs").iterdir())}


def inode(home: Home, checkpoint: str, path: str) -> int:
    return (home.checkpoint(checkpoint) / path).lstat().st_ino


def check(home: Home) -> None:
    """Every published checkpoint is whole, byte for byte."""
    for name in home.published():
        verify(home.checkpoint(name), read_manifest(home.checkpoint(name)), thorough=True)


def test_equal_files_of_two_trajectories_are_on_the_disk_once(home: Home, two: tuple[Trajectory, Trajectory]) -> None:
    one, other = two
    for each in two:
        each.write("same", b"x" * BIG)
        each.write("small", b"x" * 100)
        each.write("mode", b"y" * BIG, mode=0o600 if each is one else 0o644)
        each.write("mtime", b"z" * BIG, mtime_s=1 if each is one else 2)
        each.images = {"pages-1.img": b"p" * BIG, "pages-2.img": os.urandom(BIG)}
    first, second = one.publish("a"), other.publish("b")
    assert inode(home, "a", "layer/same") == inode(home, "b", "layer/same")
    assert inode(home, "a", "images/pages-1.img") == inode(home, "b", "images/pages-1.img")
    for different in ("layer/small", "layer/mode", "layer/mtime", "images/pages-2.img"):
        assert inode(home, "a", different) != inode(home, "b", different)
    assert first - second == 2 * (home.checkpoint("a") / "layer/same").stat().st_blocks * 512
    check(home)
    home.remove_checkpoint("a")
    assert set(blobs(home).values()) == {2}, "what only the first held is gone"
    check(home)
    home.remove_checkpoint("b")
    assert blobs(home) == {}


def test_a_moved_file_and_an_idle_process_are_shared_with_the_checkpoint_before(
    home: Home, two: tuple[Trajectory, Trajectory]
) -> None:
    one, _ = two
    (one.upper / "old").mkdir()
    one.write("old/file", b"x" * BIG)
    one.images = {"pages-1.img": os.urandom(BIG)}
    one.publish("a")
    (one.upper / "old").rename(one.upper / "new")
    os.utime(one.upper / "new", (77, 77))
    assert one.publish("b") == 0
    assert inode(home, "a", "layer/old/file") == inode(home, "b", "layer/new/file")
    assert (home.checkpoint("b") / "layer/new").stat().st_mtime == 77, "the folder's time is as if nothing was replaced"


def test_two_equal_files_of_one_container_stay_two(
    home: Home, two: tuple[Trajectory, Trajectory], tmp_path: Path
) -> None:
    """In the first checkpoint, with a blob there, with one of them taken from the checkpoint before."""
    one, other = two
    for name in ("a", "b"):
        one.write(name, b"x" * BIG)
    (one.upper / "twin").hardlink_to(one.upper / "a")
    one.publish("first")
    for name in ("c", "d"):
        other.write(name, b"x" * BIG)
    other.publish("second")
    other.write("e", b"x" * BIG)
    other.publish("third")
    for checkpoint, names, files in (("first", "a b twin", 2), ("second", "c d", 2), ("third", "c d e", 3)):
        assert len({inode(home, checkpoint, f"layer/{name}") for name in names.split()}) == files
        restored = tmp_path / checkpoint
        restored.mkdir()
        fill(home.checkpoint(checkpoint) / LAYER, restored)
        assert len({path.lstat().st_ino for path in restored.iterdir()}) == files


def test_a_blob_that_somebody_has_cut_is_not_taken(home: Home, two: tuple[Trajectory, Trajectory]) -> None:
    one, other = two
    for each in two:
        each.write("file", b"x" * BIG)
    one.publish("a")
    (blob,) = (home.root / "blobs").iterdir()
    os.truncate(blob, 1)
    other.publish("b")
    assert (home.checkpoint("b") / "layer/file").read_bytes() == b"x" * BIG


def test_a_checkpoint_in_use_is_removed_by_its_last_user(home: Home, two: tuple[Trajectory, Trajectory]) -> None:
    one, _ = two
    one.write("file", b"x" * BIG)
    one.publish("a")
    with home.in_use("a"):
        with home.in_use("a"):
            home.remove_checkpoint("a")
            home.remove_leftovers()
            assert home.published() == [], "nobody finds it any more"
        assert (home.checkpoint("a") / "layer/file").read_bytes() == b"x" * BIG
    assert list((home.root / "checkpoints").iterdir()) == []
    assert blobs(home) == {}
    with home.in_use("a"):
        pass


STEPS = frozenset(("os.link", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.utime", "fcntl.flock"))
"""Audit events of what changes a folder; `open` for writing comes on top."""


def dies_at(step: int, work: Callable[[], object]) -> bool:
    """Do the work in a process that is gone just before its n-th change of the file system; whether it was."""
    pid = os.fork()
    if pid == 0:
        left = step

        def strike(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if event in STEPS or writes:
                left -= 1
                if left < 0:
                    os._exit(9)

        try:
            sys.addaudithook(strike)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9)
    return code == 9


def tidy(home: Home) -> None:
    """As a new process of ours does at its start; what died in the last second is found all the same."""
    for entry in (home.root / "checkpoints").iterdir():
        if entry.name.startswith(".partial-"):
            os.utime(entry, (1, 1))
    home.remove_leftovers()


def held(home: Home) -> set[int]:
    """Inodes of all files of published checkpoints."""
    return {
        found.st_ino
        for name in home.published()
        for found in (path.lstat() for path in home.checkpoint(name).rglob("*"))
        if stat.S_ISREG(found.st_mode)
    }


def is_tidy(home: Home) -> bool:
    names = {path.name for path in (home.root / "checkpoints").iterdir()}
    return names == set(home.published()) and set(blobs(home)) <= held(home)


@pytest.mark.parametrize("what", ["publish", "remove", "sweep", "a removal that waited"])
def test_whoever_dies_between_any_two_steps_leaves_nothing_wrong(tmp_path: Path, what: str) -> None:
    for step in range(1000):
        home = Home(tmp_path / str(step))
        home.make()
        one, other = (Trajectory(home, tmp_path / f"{step}-{n}") for n in range(2))
        for each in (one, other):
            each.write("same", b"x" * BIG)
            each.images = {"pages-1.img": b"p" * BIG}
        other.write("more", b"y" * BIG)
        one.publish("a")
        if what != "publish":
            other.publish("b")
        if what == "sweep":
            other.write("even more", b"z" * BIG)
            other.publish("c")
            shutil.rmtree(home.checkpoint("b"))
            home.checkpoint("c").rename(tmp_path / str(step) / "checkpoints/.removed-c-1234")

        def work(home: Home = home, other: Trajectory = other) -> None:
            match what:
                case "publish":
                    other.publish("b")
                case "remove":
                    home.remove_checkpoint("b")
                case "sweep":
                    home.remove_leftovers()
                case _:
                    with home.in_use("b"):
                        home.remove_checkpoint("b")

        died = dies_at(step, work)
        check(home)
        assert "a" in home.published()
        tidy(home)
        check(home)
        assert is_tidy(home)
        assert home.published() in (["a"], ["a", "b"])
        if not died:
            assert step > 2, "the hook counts"
            assert home.published() == (["a", "b"] if what == "publish" else ["a"])
            return
        other.publish("d")
        check(home)
        assert inode(home, "a", "layer/same") == inode(home, "d", "layer/same")
        shutil.rmtree(tmp_path / str(step))
    pytest.fail("it never came to its end")


class Store(RuleBasedStateMachine):
    """Two trajectories that write, publish, fork and forget, and die in the middle of it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="belayer-blobs-"))
        self.home = Home(self.folder / "home")
        self.home.make()
        self.trajectories = [Trajectory(self.home, self.folder / str(n)) for n in range(2)]
        self.count = 0
        self.expected: dict[str, dict[str, bytes]] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    who = st.integers(0, 1)
    name = st.sampled_from(["f", "g"])

    @rule(who=who, name=name, byte=st.sampled_from([b"x", b"y"]), mtime_s=st.integers(1, 2))
    def write(self, who: int, name: str, byte: bytes, mtime_s: int) -> None:
        self.trajectories[who].write(name, byte * BIG, mtime_s=mtime_s)

    @rule(who=who, name=name)
    def link(self, who: int, name: str) -> None:
        upper = self.trajectories[who].upper
        if (upper / name).exists():
            (upper / "h").unlink(missing_ok=True)
            (upper / "h").hardlink_to(upper / name)

    @rule(who=who, dies=st.integers(0, 60))
    def publish(self, who: int, dies: int) -> None:
        self.count += 1
        name = f"c{self.count}"
        upper = self.trajectories[who].upper
        self.expected[name] = {path.name: path.read_bytes() for path in upper.iterdir()}
        shape = [one.samefile(two) for one in sorted(upper.iterdir()) for two in sorted(upper.iterdir())]
        dies_at(dies, lambda: self.trajectories[who].publish(name))
        if name in self.home.published():
            saved = sorted((self.home.checkpoint(name) / LAYER).iterdir())
            assert [one.samefile(two) for one in saved for two in saved] == shape

    @rule(data=st.data(), dies=st.integers(0, 30))
    def remove(self, data: st.DataObject, dies: int) -> None:
        if names := self.home.published():
            name = data.draw(st.sampled_from(names))
            if not dies_at(dies, lambda: self.home.remove_checkpoint(name)):
                assert name not in self.home.published()

    @rule(dies=st.integers(0, 30))
    def tidy(self, dies: int) -> None:
        if not dies_at(dies, lambda: tidy(self.home)):
            assert is_tidy(self.home)

    @invariant()
    def whole(self) -> None:
        check(self.home)
        for name in self.home.published():
            layer = self.home.checkpoint(name) / LAYER
            assert {path.name: path.read_bytes() for path in layer.iterdir()} == self.expected[name]


Store.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
test_any_history = Store.TestCase
