"""Kernels that note in a layer where else to look (a renamed folder's old name, a changed file's old contents): such a
layer comes back in a new container, and a spare one is not filled with half of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from belayer.sandbox.apply import apply
from belayer.sandbox.layer import LayerCapture, fill

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root alone mounts")


@contextmanager
def overlay(folder: Path, lower: Path, upper: Path, *options: str) -> Iterator[Path]:
    """The merged root."""
    merged, work = folder / "merged", folder / "work"
    for each in (merged, work):
        each.mkdir(parents=True, exist_ok=True)
    layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "-o", ",".join((layers, *options)), "none", str(merged)], check=True)
    try:
        yield merged
    finally:
        subprocess.run(["umount", str(merged)], check=True)


def rename(root: Path) -> None:
    (root / "folder").rename(root / "renamed")


def change_owner(root: Path) -> None:
    os.chown(root / "folder" / "file", 1, 1)


@pytest.mark.parametrize(
    ("option", "change", "where", "mark"),
    [
        ("redirect_dir=on", rename, "renamed", "redirect"),
        ("metacopy=on", change_owner, "folder/file", "metacopy"),
    ],
)
def test_what_lies_elsewhere(
    tmp_path: Path, option: str, change: Callable[[Path], None], where: str, mark: str
) -> None:
    lower, upper, copy, filled, spare = (tmp_path / name for name in ("lower", "upper", "copy", "filled", "spare"))
    for folder in (lower / "folder", upper, copy, filled, spare):
        folder.mkdir(parents=True)
    (lower / "folder" / "file").write_text("of the image")
    with overlay(tmp_path / "one", lower, upper, option) as merged:
        change(merged)
    assert f"trusted.overlay.{mark}" in os.listxattr(upper / where)
    with LayerCapture(upper, copy) as capture:
        capture.prepare()
        capture.settle(())
        capture.finish("copy")
    fill(copy, filled)
    with overlay(tmp_path / "two", lower, filled, option) as merged:
        file = merged / where if mark == "metacopy" else merged / where / "file"
        assert file.read_text() == "of the image"
    with overlay(tmp_path / "three", lower, spare) as merged, pytest.raises(OSError, match=f"its {mark}"):
        apply(copy, merged)
