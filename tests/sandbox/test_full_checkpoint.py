"""full_checkpoint and full_restore: what comes back is what was there."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer.errors import HostUnfitError, RestoreFailedError
from belayer.journal.events import SandboxSpec
from belayer.sandbox import manifest as manifests
from belayer.sandbox.docker_host import open_host
from belayer.sandbox.limits import Limits
from belayer.sandbox.manifest import FILE_NAME, boot_id, read_manifest
from belayer.sandbox.options import PROCESSES
from belayer.sandbox.protocol import CheckpointReport
from tests.sandbox.conftest import IMAGE, SPEC, Bench, Live
from tests.waiting import within

pytestmark = pytest.mark.sandbox
IDLE_BYTES = 8_000_000
IDLE = f"""python3 -c '
import os, signal
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
kept = os.urandom({IDLE_BYTES})
open("/tmp/up", "w")
signal.pause()'"""
"""On one CPU, because the kernel writes the number of the CPU into a process's memory: rseq(2)."""

FILES = r"""
set -e
mkdir -p kept gone opaque sub/deep
echo one > kept/a; ln kept/a kept/hard; ln -s /etc/shadow kept/link
printf x > "$(printf 'kept/new\nline\377')"
truncate -s 50M kept/sparse; echo end >> kept/sparse
chmod 4755 kept/a; chown 12:34 kept/hard
python3 -c "import os; os.setxattr('sub', 'user.mark', b'v')"
rm /etc/debian_version; cd /usr/lib/python3.11; rm -r curses; mkdir curses; echo fresh > curses/new; cd /testbed
mkfifo sub/fifo; echo in-shm > /dev/shm/note
find . /usr/lib/python3.11/curses -printf '%p %y %m %U %G %n %s\n' | sort | md5sum
"""
LOOK = r"""
find . /usr/lib/python3.11/curses -printf '%p %y %m %U %G %n %s\n' | sort | md5sum
ls /etc/debian_version 2>/dev/null || echo gone
[ kept/a -ef kept/hard ] && echo linked
readlink kept/link; stat -c %b kept/sparse
python3 -c "import os; print(os.getxattr('sub', 'user.mark'))"
cat /dev/shm/note; ls /usr/lib/python3.11/curses
"""

SERVER = r"""
cat > server.py <<'END'
import os, sys, threading, time, mmap
counter = 0
memory = bytearray(b"m" * 4_000_000)
shared = mmap.mmap(-1, 4096)
unlinked = open("unlinked", "w+"); os.unlink("unlinked"); unlinked.write("still here"); unlinked.flush()
r, w = os.pipe(); os.write(w, b"in the pipe")
threading.Thread(target=time.sleep, args=(10000,), daemon=True).start()
while True:
    with open("ask") as ask:
        for line in ask:
            counter += 1
            memory[counter] = 65
            shared[0] = counter
            unlinked.seek(0)
            told = [line.strip(), counter, memory.count(b"A"), shared[0], unlinked.read(), threading.active_count()]
            with open("answer", "w") as answer:
                print(*told, file=answer)
END
mkfifo ask answer
python3 server.py &
echo first > ask; cat answer
"""


async def test_files_and_processes_come_back(bench: Bench) -> None:
    live = await bench.create()
    await live.sh(FILES)
    assert await live.sh(SERVER) == "first 1 1 1 still here 2\n"
    await live.sh(
        "mkfifo lines; (n=0; while :; do read l < lines || continue; n=$((n + 1)); echo $l $n > told; done) & true"
    )
    await live.sh("(sleep 1000 | cat > /dev/null) & echo a > lines; until [ -s told ]; do :; done")
    tree = await live.sh("ps -e -o pid=,ppid=,sid=,args= | grep -v 'ps -e\\|bash -c ps'")
    looked = await live.sh(LOOK)
    checkpoint = await live.checkpoint()
    assert await live.sh("echo second > ask; cat answer; rm -r kept; pkill -f '[l]ines'; echo more > afterwards")

    back = await live.kill_and_restore(checkpoint, live.number - 1)
    assert await back.sh("ls afterwards 2>&1", status=2)
    assert await back.sh(LOOK) == looked
    assert await back.sh("echo again > ask; cat answer") == "again 2 2 2 still here 2\n"
    assert await back.sh("rm told; echo b > lines; until [ -s told ]; do :; done; cat told") == "b 2\n"
    assert await back.sh("ps -e -o pid=,ppid=,sid=,args= | grep -v 'ps -e\\|bash -c ps'") == tree


async def test_docker_knows_a_restored_container(bench: Bench) -> None:
    live = await bench.create()
    await live.sh("sleep 1000 & echo here > file")
    back = await live.kill_and_restore(await live.checkpoint())
    name = back.incarnation.name
    assert name in await docker("ps", "--format", "{{.Names}}")
    assert await docker("exec", name, "cat", "/testbed/file") == "here\n"
    await docker("logs", name)
    assert await docker("inspect", "-f", "{{.State.Pid}}", name) == f"{back.incarnation.pid}\n"
    waiting = asyncio.ensure_future(back.sandbox.wait_dead())
    await docker("kill", name)
    assert "ended" in await within(waiting)


async def test_limits_hold_after_a_restore(bench: Bench) -> None:
    spec = SandboxSpec(IMAGE, workdir="/testbed", memory_bytes=200 << 20, cpus=1.5)
    live = await bench.create(spec)
    await live.sh("sleep 1000 & mkdir /dev/shm/kept")
    before = cgroups(live.incarnation.pid)
    checkpoint = await live.checkpoint()
    await live.sandbox.close()
    await bench.host.remove(live.incarnation.name)
    back = await bench.restore(checkpoint, 1, spec)
    sleeper = int(Path(f"/proc/{back.incarnation.pid}/task/{back.incarnation.pid}/children").read_text())
    now = cgroups(back.incarnation.pid)
    assert {controller: path.replace(back.incarnation.container_id, "ID") for controller, path in now.items()} == {
        controller: path.replace(live.incarnation.container_id, "ID") for controller, path in before.items()
    }
    assert cgroups(sleeper) == now
    limit = await back.sh(
        "cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null || true"
    )
    assert limit.split() == [str(200 << 20)]
    limit = await back.sh("cat /sys/fs/cgroup/pids/pids.max /sys/fs/cgroup/pids.max 2>/dev/null || true")
    assert limit.split() == [str(PROCESSES)]
    await back.sh("touch /proc/acpi/x /proc/sys/x /sys/x /.belayer/runner.py", status=1)


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Path]:
    """A cgroup hierarchy mounted as CRIU mounts it for itself for a moment."""
    made = tmp_path / ".criu.cgyard.test"
    made.mkdir()
    kind = ["cgroup", "-o", "memory"] if Path("/sys/fs/cgroup/memory").exists() else ["cgroup2"]
    subprocess.run(["mount", "-t", *kind, "none", str(made)], check=True)
    try:
        yield made
    finally:
        if made.is_mount():
            subprocess.run(["umount", str(made)], check=True)


async def test_cgroups_that_another_criu_has_mounted_are_not_the_hosts(bench: Bench, yard: Path) -> None:
    live = await bench.create()
    await live.sh("sleep 1000 &")
    checkpoint = await live.checkpoint()
    await asyncio.to_thread(subprocess.run, ["umount", str(yard)], check=True)
    back = await live.kill_and_restore(checkpoint)
    assert await back.sh("pgrep -c sleep") == "1\n"


def cgroups(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return {controller: path for _, controller, path in (line.split(":", 2) for line in lines)}


async def docker(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec("docker", *arguments, stdout=-1, stderr=-1)
    out, err = await within(process.communicate())
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_the_original_goes_on_and_numbers_stay_unique(bench: Bench) -> None:
    live = await bench.create()
    await live.sh("echo 1 >> runs")
    checkpoint = await live.checkpoint()
    assert await live.sh("echo 2 >> runs; cat runs") == "1\n2\n"
    back = await bench.restore(checkpoint, 1)
    back.number = 0
    assert await back.sh("echo never >> runs") == "", "action 1 is answered from what the checkpoint recorded"
    assert await back.sh("cat runs") == "1\n"
    assert await live.sh("cat runs") == "1\n2\n", "the original is untouched by its copy"


@pytest.mark.parametrize("kind", ["quiet", "with a process"])
async def test_ten_cycles_lose_nothing(bench: Bench, kind: str) -> None:
    live = await bench.create()
    if kind == "quiet":
        for cycle in range(1, 11):
            await live.sh(f"echo {cycle} >> log; rm -f gone-{cycle - 1}; touch gone-{cycle}")
            live = await live.kill_and_restore(await live.checkpoint())
        assert (await live.sh("cat log; ls")).split() == [*map(str, range(1, 11)), "gone-10", "log"]
        return
    await live.sh("mkfifo q; (n=0; while :; do read l < q || continue; n=$((n + 1)); echo $n > n; done) & true")
    for cycle in range(1, 11):
        await live.sh(f"echo {cycle} >> log; rm -f n; echo go > q; until [ -s n ]; do :; done")
        live = await live.kill_and_restore(await live.checkpoint())
    assert (await live.sh("cat log n")).split() == [str(n) for n in [*range(1, 11), 10]]
    for masked in ("/proc/acpi", "/sys/firmware"):
        assert "Read-only" in await live.sh(f"mkdir {masked}/x 2>&1 || true"), masked


async def test_what_a_checkpoint_says_of_itself(bench: Bench) -> None:
    live = await bench.create()
    await live.sh("head -c 1000000 /dev/urandom > blob")
    name = bench.name()
    report = await bench.host.checkpoint(live.incarnation, name, 1)
    folder = bench.host.checkpoint_path(name)
    manifest = read_manifest(folder)
    assert name in await bench.host.checkpoints()
    assert (manifest.run, manifest.trajectory, manifest.action) == (bench.run, bench.trajectory, 1)
    assert manifest.image_digest == live.incarnation.image_digest
    assert report.size_bytes == manifest.size_bytes > 1_000_000
    assert 0 < report.frozen_s < report.total_s
    assert folder.stat().st_mode & 0o777 == 0o700
    await bench.host.remove_checkpoint(name)
    await bench.host.remove_checkpoint(name)
    assert name not in await bench.host.checkpoints()


@pytest.mark.parametrize("damage", ["manifest", "missing image", "cut image", "garbled image", "none such"])
async def test_a_bad_checkpoint_leaves_no_container(bench: Bench, damage: str) -> None:
    live = await bench.create()
    await live.sh("sleep 1000 &")
    checkpoint = await live.checkpoint()
    folder = bench.host.checkpoint_path(checkpoint)
    images = sorted((folder / "images").glob("core-*.img"))
    match damage:
        case "manifest":
            (folder / FILE_NAME).write_text("{")
        case "missing image":
            images[0].unlink()
        case "cut image":
            images[0].write_bytes(images[0].read_bytes()[:-1])
        case "garbled image":
            images[0].write_bytes(bytes(len(images[0].read_bytes())))
        case _:
            checkpoint = "none-such"
    before = await bench.host.incarnations()
    with pytest.raises(RestoreFailedError) as failure:
        await bench.restore(checkpoint, 1)
    assert failure.value.checkpoint == checkpoint
    assert await bench.host.incarnations() == before
    assert await live.sh("echo alive") == "alive\n"


@pytest.mark.parametrize("part", ["layer/testbed/file", "images/pages-1.img", "probe.json", "layer.index"])
@pytest.mark.parametrize("rebooted", [False, True])
async def test_every_byte_is_checked(bench: Bench, monkeypatch: pytest.MonkeyPatch, part: str, rebooted: bool) -> None:
    """After a reboot: what the machine's end may have left behind a published name. Of a small one at any time."""
    live = await bench.create()
    await live.sh("echo precious > file; sleep 1000 &")
    checkpoint = await live.checkpoint()
    folder = bench.host.checkpoint_path(checkpoint)
    if rebooted:
        monkeypatch.setattr(manifests, "CHECKED_BYTES", 0)
        written = (folder / FILE_NAME).read_text()
        (folder / FILE_NAME).write_text(written.replace(boot_id(), "another boot"))
    back = await bench.restore(checkpoint, 1)
    assert await back.sh("cat file; pgrep -c sleep") == "precious\n1\n"
    damaged = folder / part
    damaged.write_bytes(bytes(damaged.stat().st_size))
    with pytest.raises(RestoreFailedError, match="damaged"):
        await bench.restore(checkpoint, 1)


async def test_what_a_dead_machine_left_half_made_is_removed(bench: Bench) -> None:
    folder = bench.host.checkpoint_path("x").parent
    for name in (".partial-gone-1234", ".removed-gone-1234"):
        (folder / name / "layer").mkdir(parents=True)
        os.utime(folder / name, (1, 1))
    assert not any("gone" in name for name in await bench.host.checkpoints())
    assert not any("gone" in path.name for path in folder.iterdir())


async def test_the_memory_of_an_idle_process_is_on_the_disk_once(bench: Bench) -> None:
    live = await bench.create()
    await live.sh(f"{IDLE} & until [ -e /tmp/up ] && grep -q '^State:.S' /proc/$!/status; do sleep 0.01; done")
    names, reports = (bench.name(), bench.name()), list[CheckpointReport]()
    for name in names:
        await live.sh(f"echo {name} > file")
        reports.append(await bench.host.checkpoint(live.incarnation, name, live.number))
    first, second = reports
    assert first.stored_bytes > IDLE_BYTES and second.size_bytes > IDLE_BYTES
    assert second.stored_bytes < first.stored_bytes - IDLE_BYTES
    await bench.host.remove_checkpoint(names[0])
    back = await live.kill_and_restore(names[1])
    assert await back.sh("cat file; pgrep -c python3") == f"{names[1]}\n2\n"


async def test_a_machine_that_lacks_room_is_at_fault_and_not_the_checkpoint(bench: Bench, home: Path) -> None:
    live = await bench.create()
    checkpoint = await live.checkpoint()
    (bench.host.checkpoint_path(checkpoint) / FILE_NAME).write_text("{")
    async with open_host(home, spares=0, limits=Limits(spare_bytes=1 << 62)) as full:
        with pytest.raises(HostUnfitError, match="bytes are free"):
            await full.restore(bench.run, bench.trajectory, bench.name(), SPEC, checkpoint, 0)
    with pytest.raises(RestoreFailedError):
        await bench.restore(checkpoint, 0)


async def test_names_as_long_as_the_longest_trajectorys_make_them(bench: Bench) -> None:
    longest = f"{bench.run}-{'t' * 128}"[:128]
    made = await bench.host.create(bench.run, longest, f"belayer-{longest}-e1234567-2-0123abcd", SPEC)
    live = Live(bench, await bench.host.attach(made), 0)
    await live.sh("echo kept > file; sleep 1000 &")
    checkpoint = f"{longest}-b123456-e1234567-0123abcd"
    await bench.host.checkpoint(live.incarnation, checkpoint, 1)
    back = await bench.host.restore(bench.run, longest, f"belayer-{longest}-e1234569-2-0123abcd", SPEC, checkpoint, 1)
    assert await Live(bench, await bench.host.attach(back), 1).sh("cat file; pgrep -c sleep") == "kept\n1\n"
