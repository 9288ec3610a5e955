"""Access control lists come back exactly: of every kind of entry, and none that a folder gives to what is new in it."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import pytest

from belayer.sandbox.apply import apply
from belayer.sandbox.layer import LayerCapture, fill

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="layers belong to root")
OWNER, USER, GROUP, MASK, OTHER = 1, 2, 4, 16, 32
NOBODY = (1 << 32) - 1
ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
LIST = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, rights, whose)
    for tag, rights, whose in (
        (OWNER, 7, NOBODY),
        (USER, 7, 1234),
        (GROUP, 5, NOBODY),
        (MASK, 7, NOBODY),
        (OTHER, 5, NOBODY),
    )
)
"""User 1234 may do everything. acl(5); Linux, include/uapi/linux/posix_acl_xattr.h."""


def make(upper: Path) -> None:
    """Entries from before their folder had a default list and from after, and one of each kind that has a list."""
    folder = upper / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "before").write_text("x")
    os.mkfifo(folder / "pipe-before")
    os.setxattr(folder, DEFAULT, LIST)
    (folder / "after").write_text("x")
    os.mkfifo(folder / "pipe-after")
    (folder / "below").mkdir()
    os.mknod(upper / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    os.setxattr(upper / "device", ACCESS, LIST)
    (upper / "link").symlink_to("folder")


def rights(root: Path) -> dict[str, tuple[int, dict[str, bytes]]]:
    return {
        str(path.relative_to(root)): (
            path.lstat().st_mode,
            {
                name: os.getxattr(path, name, follow_symlinks=False)
                for name in os.listxattr(path, follow_symlinks=False)
            },
        )
        for path in sorted(root.rglob("*"))
    }


def test_every_entry_has_its_own_rights(tmp_path: Path) -> None:
    upper, copy, filled, applied = (tmp_path / name for name in ("upper", "copy", "filled", "applied"))
    for folder in (upper, copy, filled, applied):
        folder.mkdir()
    make(upper)
    expected = rights(upper)
    assert ACCESS in expected["folder/pipe-after"][1] and ACCESS not in expected["folder/before"][1]
    with LayerCapture(upper, copy) as capture:
        capture.prepare()
        capture.settle(())
        capture.finish("copy")
    assert rights(copy) == expected
    fill(copy, filled)
    assert rights(filled) == expected
    (applied / "folder").mkdir()  # as the image has it
    os.setxattr(applied / "folder", DEFAULT, LIST)
    apply(copy, applied)
    assert rights(applied) == expected


def test_what_comes_anew_into_a_folder_that_is_copied(tmp_path: Path) -> None:
    upper, copy = tmp_path / "upper", tmp_path / "copy"
    upper.mkdir()
    copy.mkdir()
    make(upper)
    with LayerCapture(upper, copy) as capture:
        capture.prepare()
        new = upper / "folder" / "new"
        new.write_text("x")
        os.removexattr(new, ACCESS)
        capture.settle(())
        capture.finish("copy")
    assert rights(copy) == rights(upper)
