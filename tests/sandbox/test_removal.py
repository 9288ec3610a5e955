"""Trees that a container made as deep as it could: they go, and one that stays hurts nobody."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from belayer.sandbox.home import Home
from belayer.sandbox.removal import remove_tree

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="layers belong to root")
LEVELS = 2200
"""Twice as many bytes: more than PATH_MAX, and more levels than Python recurses."""


def deepen(folder: Path, levels: int, name: str = "d") -> None:
    """A chain of folders below it, with a file in the last."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


def names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()]


@contextmanager
def descriptors(limit: int) -> Iterator[None]:
    """No more than so many beyond those that are open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, names(Path("/proc/self/fd")))) + limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_tree_deeper_than_any_path_is_removed(emptied: Path) -> None:
    outside = emptied / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    tree = emptied / "tree"
    tree.mkdir()
    (tree / "way out").symlink_to(outside)
    deepen(tree, LEVELS)
    deepen(tree, 50, name="beside")
    with descriptors(10):
        remove_tree(tree)
    assert names(emptied) == ["outside"]
    assert names(outside) == ["kept"]
    remove_tree(tree)
    remove_tree(tree / "not" / "there")


def test_leftovers_of_any_depth_go(emptied: Path) -> None:
    home = Home(emptied)
    home.make()
    deep = emptied / "checkpoints" / ".removed-deep-1"
    deep.mkdir()
    deepen(deep, LEVELS)
    assert home.remove_leftovers() == [deep.name]
    assert not deep.exists()


def test_a_leftover_that_stays_stops_nobody(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make()
    folders = [tmp_path / "checkpoints" / f".removed-{name}-1" for name in ("a", "busy", "c")]
    for folder in folders:
        (folder / "mounted").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", str(folders[1] / "mounted")], check=True)
    try:
        with capture_logs() as logged:
            home.remove_leftovers()
        assert [entry["folder"] for entry in logged] == [str(folders[1])]
        assert [folder for folder in folders if folder.exists()] == [folders[1]]
    finally:
        subprocess.run(["umount", str(folders[1] / "mounted")], check=True)
    assert home.remove_leftovers() == [folders[1].name]
    assert names(tmp_path / "checkpoints") == []
