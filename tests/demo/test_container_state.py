import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer.demo.container_state import Digests, process_tree, read_tree
from tests.waiting import DEADLINE_S, until


def test_files_are_read_with_all_but_their_times(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir(mode=0o750)
    (tmp_path / "folder" / "text").write_bytes(b"hello")
    (tmp_path / "folder" / "text").chmod(0o640)
    os.setxattr(tmp_path / "folder" / "text", "user.note", b"x")
    (tmp_path / "link").symlink_to("folder/text")
    os.mkfifo(tmp_path / "pipe", 0o600)
    known: Digests = {}
    before = read_tree(tmp_path, set(), known)
    assert {path: state.kind for path, state in before.items()} == {
        "/folder": "directory",
        "/folder/text": "file",
        "/link": "link",
        "/pipe": "fifo",
    }
    text = before["/folder/text"]
    assert (text.mode, text.size_bytes, text.xattrs) == (0o640, 5, (("user.note", b"x"),))
    assert before["/link"].content == "folder/text"
    os.utime(tmp_path / "folder" / "text", (1, 1))
    assert read_tree(tmp_path, set(), known) == before
    (tmp_path / "folder" / "text").write_bytes(b"hullo")
    os.utime(tmp_path / "folder" / "text", (1, 1))
    assert read_tree(tmp_path, set(), known)["/folder/text"].content != text.content, "an old digest was believed"


def test_mounts_are_passed_over_but_shared_memory_is_not(tmp_path: Path) -> None:
    for folder in ("proc", "dev/shm", "own"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").write_bytes(b"")
    found = read_tree(tmp_path, {"/", "/proc", "/dev", "/dev/shm"}, {})
    assert sorted(found) == ["/dev/shm/file", "/own", "/own/file"]


def test_temporary_names_compare_equal_and_none_is_lost(tmp_path: Path) -> None:
    for name, text in (("tmpaaaaaaaa", b"1"), ("tmpbbbbbbbb", b"2")):
        (tmp_path / "tmp" / name).mkdir(parents=True)
        (tmp_path / "tmp" / name / "x").write_bytes(text)
    first = read_tree(tmp_path, set(), {})
    (tmp_path / "tmp" / "tmpaaaaaaaa").rename(tmp_path / "tmp" / "tmpcccccccc")
    assert read_tree(tmp_path, set(), {}) == first
    assert "/tmp/<temporary>/x" in first and "/tmp/<temporary>/x (2)" in first


@pytest.fixture
def shell() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["bash", "-c", "sleep 60 & sleep 61; true"])
    yield process
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    process.kill()
    process.wait(timeout=DEADLINE_S)


async def test_processes_are_read_as_a_tree(shell: subprocess.Popen[bytes]) -> None:
    wanted = ["  sleep 60", "  sleep 61"]

    def children() -> bool:
        tree = process_tree(os.getpid())
        at = next((index for index, line in enumerate(tree) if line.startswith("bash -c")), len(tree))
        return tree[at + 1 : at + 3] == wanted

    assert await until(children, what="the shell with its two children")
