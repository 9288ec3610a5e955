"""Reading files in a process of its own; a Python in a root of its own stands for a container."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer.demo.container_state import process_tree, read_tree
from belayer.demo.reading import ContainerReader
from tests.waiting import DEADLINE_S

IN_ROOT = "import os, sys; os.chroot(sys.argv[1]); os.write(1, b'!'); os.read(0, 1)"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "text").write_bytes(b"hello")
    (tmp_path / os.fsdecode(b"not \xff text")).write_bytes(b"")
    return tmp_path


@pytest.fixture
def container(root: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", IN_ROOT, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.read(1) == b"!"
        yield process
        process.kill()


@pytest.fixture
def gone() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        process.wait(timeout=DEADLINE_S)
    return process.pid


async def test_it_reads_what_is_there_and_leaves_no_process(root: Path, container: subprocess.Popen[bytes]) -> None:
    async with ContainerReader() as reader:
        found = await reader.read(container.pid, watched=False)
        assert found.files == read_tree(root, set(), {}) and len(found.files) == 3
        (root / "folder" / "text").write_bytes(b"hullo!")
        again = await reader.read(container.pid, watched=False)
        assert again.files["/folder/text"].size_bytes == 6
        assert any("belayer.demo.reading" in line for line in process_tree(os.getpid()))
    assert not any("belayer.demo.reading" in line for line in process_tree(os.getpid()))


async def test_a_container_that_is_gone_is_an_error_of_its_own_read_only(
    container: subprocess.Popen[bytes], gone: int
) -> None:
    async with ContainerReader() as reader:
        with pytest.raises(OSError, match=str(gone)):
            await reader.read(gone, watched=False)
        assert len((await reader.read(container.pid, watched=False)).files) == 3


async def test_an_answer_that_nobody_waited_for_is_given_to_nobody_else(
    container: subprocess.Popen[bytes], gone: int
) -> None:
    async with ContainerReader() as reader:
        await reader.read(container.pid, watched=False)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await reader.read(gone, watched=False)
        assert len((await reader.read(container.pid, watched=False)).files) == 3
