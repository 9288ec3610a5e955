"""A checkpoint's folder is all of it: copied to another Belayer folder, under another path and without the blobs that
it shared, it comes back there as on another machine; so does a layer of 5 GB, and its holes stay holes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

from belayer.sandbox.docker_host import open_host
from belayer.sandbox.manifest import read_manifest, write_manifest
from tests.sandbox.conftest import Bench, bench_of

pytestmark = pytest.mark.sandbox

COUNTER = r"""
mkfifo ask answer
python3 -c "if True:
    count = 0
    while True:
        for line in open('ask'):
            count += 1
            open('answer', 'w').write(f'{line.strip()} {count}\n')" > /dev/null 2>&1 &
echo first > ask; cat answer
"""
SPARSE = """
set -e
truncate -s 5G big
for at in 0 2621440 5242879; do head -c 1024 /dev/urandom | dd of=big bs=1024 seek=$at conv=notrunc status=none; done
mkdir -p small/{1..20}
for i in $(seq 2000); do echo $i > small/$((i % 20 + 1))/$i; done
"""
LOOK = """
python3 - <<'END'
import hashlib, os
fd, at, size = os.open('big', os.O_RDONLY), 0, os.stat('big').st_size
while at < size:
    try:
        at = os.lseek(fd, at, os.SEEK_DATA)
    except OSError:
        break
    end = os.lseek(fd, at, os.SEEK_HOLE)
    print(at, end, hashlib.sha256(os.pread(fd, end - at, at)).hexdigest())
    at = end
print(size, os.stat('big').st_blocks, os.stat('big').st_mtime_ns)
END
find small -type f -printf '%p %s %T@\\n' -exec cat {} + | sort | sha256sum
"""


def copy_to(there: Path, home: Path, checkpoint: Path) -> None:
    """Another machine's Belayer folder, and in it the checkpoint, made before that machine's boot."""
    (there / "checkpoints").mkdir(parents=True)
    (there / "criu").symlink_to((home / "criu").resolve())
    copied = there / "checkpoints" / checkpoint.name
    subprocess.run(["cp", "-a", checkpoint, copied], check=True)
    write_manifest(copied, msgspec.structs.replace(read_manifest(copied), boot_id="another"))


@pytest.mark.parametrize("kind", ["quiet", "with a process"])
async def test_restored_where_only_its_folder_is(bench: Bench, home: Path, tmp_path: Path, kind: str) -> None:
    live = await bench.create()
    if kind != "quiet":
        assert await live.sh(COUNTER) == "first 1\n"
    await live.sh("head -c 100000 /dev/urandom > file; ln file twin; md5sum file > sum")
    await live.checkpoint()
    await live.sh("echo more > more")
    checkpoint, number = await live.checkpoint(), live.number  # shares its files with the one before

    there = tmp_path / "there"
    copy_to(there, home, bench.host.checkpoint_path(checkpoint))
    await bench.host.remove_run(bench.run)

    async with open_host(there, spares=0) as host, bench_of(host) as elsewhere:
        assert list((there / "blobs").iterdir()) == []
        back = await elsewhere.restore(checkpoint, number)
        assert await back.sh("md5sum -c sum; [ file -ef twin ] && cat more") == "file: OK\nmore\n"
        if kind != "quiet":
            assert await back.sh("echo again > ask; cat answer") == "again 2\n"
        again = await back.kill_and_restore(await back.checkpoint())
        assert await again.sh("cat more") == "more\n"
        await host.remove_checkpoint(checkpoint)


async def test_a_layer_of_5_gb_comes_back_with_its_holes(bench: Bench) -> None:
    live = await bench.create()
    await live.sh(SPARSE)
    looked = await live.sh(LOOK)
    assert looked.splitlines()[3].startswith(f"{5 << 30} ")
    checkpoint = await live.checkpoint()
    manifest = read_manifest(bench.host.checkpoint_path(checkpoint))
    assert manifest.layer_bytes < 20 << 20
    back = await live.kill_and_restore(checkpoint)
    assert await back.sh(LOOK) == looked
