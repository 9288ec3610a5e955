"""The OCI runtime that Docker knows: one path, several versions beside it, none in another's way."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from belayer.sandbox.runtime import OLD_S, Runtime

SAY = '#!/bin/sh\necho runc "$@"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Belayer folder whose `runc` says what it was asked."""
    (tmp_path / "criu").mkdir()
    runc = tmp_path / "criu" / "runc"
    runc.write_text(SAY)
    runc.chmod(0o755)
    return tmp_path


def ask(folder: Path, *arguments: str) -> str:
    environment = {"PATH": f"{folder / 'criu'}:{os.environ['PATH']}"}
    command = [folder / "runtime" / "runc", *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def test_only_a_requested_container_is_restored(folder: Path) -> None:
    runtime = Runtime(folder / "runtime" / "runc")
    runtime.install()
    create = ("--root", "/r", "create", "--bundle", "/b", "one")
    assert ask(folder, *create) == "runc --root /r create --bundle /b one\n"
    with runtime.restoring("one", Path("/images"), Path("/work"), ["--lazy-pages"]):
        assert ask(folder, "create", "other") == "runc create other\n"
        restore = "restore --detach --image-path /images --work-path /work --lazy-pages"
        assert ask(folder, *create) == f"runc --root /r {restore} --bundle /b one\n"
        assert ask(folder, "start", "one") == "", "it runs already"
        assert ask(folder, "start", "one") == "runc start one\n", "once"
    assert list((folder / "restore").iterdir()) == []


def test_versions_do_not_meet(folder: Path) -> None:
    path = folder / "runtime" / "runc"
    runtime = Runtime(path)
    runtime.install()
    other = path.with_name("runc-another1")
    other.write_text('#!/bin/sh\necho other "$@"\n')
    other.chmod(0o755)
    (folder / "restore").mkdir()
    (folder / "restore" / "two").write_text("runc-another1\n")
    runtime.install()
    runtime.remove_old()
    assert ask(folder, "create", "two") == f"other {folder}/runtime/../restore/two create two\n"
    for path_of_old in (other, folder / "restore" / "two"):
        os.utime(path_of_old, (0, path_of_old.stat().st_mtime - OLD_S - 1))
    runtime.remove_old()
    assert not other.exists()
    assert ask(folder, "create", "two") == "runc create two\n"


def test_what_an_old_belayer_put_there_is_replaced(folder: Path) -> None:
    path = folder / "runtime" / "runc"
    runtime = Runtime(path)
    runtime.install()
    path.write_text(SAY)
    next(path.parent.glob("runc-*")).unlink()
    with runtime.restoring("one", Path("/images"), Path("/work"), []):
        assert "restore" in ask(folder, "create", "one")
