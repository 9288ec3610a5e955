"""Large memories are copied beside CRIU: every kind of page comes back, and what does not fit leaves no trace."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer.errors import CheckpointFailedError
from belayer.sandbox import memory
from belayer.sandbox.memory import Copied
from tests.sandbox.conftest import Bench

KINDS = """cat > kinds.py <<'END'
import ctypes, hashlib, mmap, os

PAGE = 4096
libc = ctypes.CDLL(None, use_errno=True)
private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

def address(area):
    return ctypes.addressof(ctypes.c_char.from_buffer(area))

def protect(area, how):
    assert libc.mprotect(ctypes.c_void_p(address(area)), ctypes.c_size_t(len(area)), how) == 0

plain = mmap.mmap(-1, 80 << 20, flags=private)
plain.write(os.urandom(1 << 20) * 80)
sparse = mmap.mmap(-1, 40 << 20, flags=private)
for at in range(0, len(sparse), 3 * PAGE):
    sparse[at:at + 8] = at.to_bytes(8, "big")
zeros = mmap.mmap(-1, 4 << 20, flags=private)
zeros.write(bytes(len(zeros)))
looked_at = mmap.mmap(-1, 4 << 20, flags=private)
hashlib.md5(looked_at).digest()
code = mmap.mmap(-1, 2 << 20, flags=private, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(os.urandom(len(code)))
locked = mmap.mmap(-1, 1 << 20, flags=private)
locked.write(os.urandom(len(locked)))
assert libc.mlock(ctypes.c_void_p(address(locked)), ctypes.c_size_t(16 * PAGE)) == 0
shared = mmap.mmap(-1, 2 << 20)
shared.write(os.urandom(len(shared)))
with open("file", "wb") as out:
    out.write(os.urandom(2 << 20))
with open("file", "rb") as source:
    changed = mmap.mmap(source.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
changed[PAGE:3 * PAGE] = os.urandom(2 * PAGE)
hidden = mmap.mmap(-1, 3 << 20, flags=private)
hidden.write(os.urandom(len(hidden)))
protect(hidden, 0)
areas = [plain, sparse, zeros, looked_at, code, locked, shared, changed, hidden]

def digest():
    protect(hidden, mmap.PROT_READ | mmap.PROT_WRITE)
    found = hashlib.md5(b"".join(areas)).hexdigest()
    protect(hidden, 0)
    return found

name = "parent"
if os.fork() == 0:
    name = "child"
    plain[5 * PAGE:9 * PAGE] = os.urandom(4 * PAGE)
open(f"{name}.digest", "w").write(digest())
os.mkfifo(f"{name}.ask")
while open(f"{name}.ask").read():
    open(f"{name}.new", "w").write(digest())
    os.rename(f"{name}.new", f"{name}.answer")
END
python3 kinds.py > /dev/null 2>&1 & until [ -e parent.ask ] && [ -e child.ask ]; do sleep 0.01; done
cmp parent.digest child.digest > /dev/null && exit 1 || exit 0"""
ASK = """for one in parent child; do
echo > $one.ask; until [ -e $one.answer ]; do sleep 0.01; done; cmp $one.digest $one.answer || exit 1
done"""
LARGE = """python3 -c 'import time; memory = b"x" * (100 << 20); open("up", "w"); time.sleep(1000)' > /dev/null &
until [ -e up ]; do sleep 0.01; done"""


@given(st.lists(st.integers(0, 40), min_size=2, max_size=12, unique=True), st.integers(0, 40), st.integers(1, 20))
def test_a_range_is_covered_once_and_in_order(cuts: list[int], start: int, size: int) -> None:
    cuts.sort()
    pieces = [(first, last, 1000 + first) for first, last in zip(cuts[::2], cuts[1::2], strict=False)]
    found = list(Copied(0, pieces[::-1]).cover(start, start + size))
    assert [at for first, last, _ in found for at in range(first, last)] == list(range(start, start + size))
    for first, last, at in found:
        holders = {piece for piece in pieces for page in range(first, last) if piece[0] <= page < piece[1]}
        assert len(holders) == (at is not None)
        assert at is None or at == 1000 + first


def test_little_memory_is_left_to_criu() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        assert memory.room_for([process.pid]) is None
        process.kill()


@pytest.fixture
def limited() -> Iterator[tuple[Path, int]]:
    """A cgroup that may have 100 MB."""
    root = Path("/sys/fs/cgroup")
    version_1 = (root / "memory" / "memory.limit_in_bytes").exists()
    folder = (root / "memory" if version_1 else root) / f"belayer-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(100 << 20))
    except OSError as error:
        pytest.skip(f"no cgroup of our own can be made here: {error}")
    yield folder, 100 << 20
    folder.rmdir()


def test_a_limit_of_our_own_cgroup_counts(limited: tuple[Path, int]) -> None:
    folder, limit = limited
    code = "from belayer.sandbox.memory import free_bytes; print(free_bytes())"
    enter = f"echo $$ > {folder}/cgroup.procs && exec {sys.executable} -c '{code}'"
    free = int(subprocess.run(["sh", "-c", enter], check=True, capture_output=True, text=True).stdout)
    assert 0 < free < limit


@pytest.mark.sandbox
@pytest.mark.parametrize("scan", [memory.PAGEMAP_SCAN, 0], ids=["ahead", "on a kernel that does not tell which pages"])
async def test_every_kind_of_memory_comes_back(bench: Bench, monkeypatch: pytest.MonkeyPatch, scan: int) -> None:
    monkeypatch.setattr(memory, "PAGEMAP_SCAN", scan)
    live = await bench.create()
    await live.sh(KINDS)
    back = await live.kill_and_restore(await live.checkpoint())
    assert await back.sh(ASK) == ""
    await back.sh("rm *.answer")
    again = await back.kill_and_restore(await back.checkpoint())
    assert await again.sh(ASK) == ""


@pytest.mark.sandbox
async def test_memory_that_has_outgrown_its_room_fails_the_checkpoint_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = await bench.create()
    await live.sh(LARGE)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "SPARE_BYTES", -(60 << 20))
        with pytest.raises(CheckpointFailedError, match="has grown"):
            await live.checkpoint()
    back = await live.kill_and_restore(await live.checkpoint())
    assert "memory" in await back.sh("ps axo args")
