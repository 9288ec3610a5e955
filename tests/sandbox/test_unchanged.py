"""A checkpoint holds a later boundary exactly when nothing has changed: never wrongly, however small the change."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection
from pathlib import Path

import pytest

from belayer.errors import CheckpointRefusedError, RestoreFailedError, SandboxFailedError
from belayer.sandbox.captured import Captured, rebase
from belayer.sandbox.layer import LayerCapture
from belayer.sandbox.protocol import Action
from belayer.sandbox.unchanged import is_unchanged
from tests.sandbox.conftest import Bench, Live

FILES = "mkdir -p sub; echo one > file; echo two > sub/other; ln -s file link; python3 -c 'import os; os.mkfifo(\"p\")'"
ONLY_LOOKS = "cat file sub/other link; ls -laR . /etc > /dev/null; git --version; find / -xdev -name '*.conf' | wc -l"

MAP = 'python3 -c \'import mmap, os; f = open("file", "r+b"); m = mmap.mmap(f.fileno(), 0); {}\''
CHANGES = {
    "contents": "echo new > file",
    "contents of the same size, the old mtime": "touch -r file sub/t; echo eno > file; touch -r sub/t file; rm sub/t",
    "a write through a mapping": MAP.format('m[0:1] = b"X"; m.flush()'),
    "a write through a mapping after a read, without a flush": MAP.format('m[0]; m[0:1] = b"X"; os._exit(0)'),
    "only an mtime": "touch -d '2001-01-01' file",
    "only a folder's mtime": "touch -d '2001-01-01' sub",
    "only an xattr": 'python3 -c \'import os; os.setxattr("file", "user.a", b"b")\'',
    "only a mode": "chmod 600 sub/other",
    "only a link's owner": "chown -h 1:1 link",
    "only the root's mode": "chmod 711 /",
    "a new name": "mv file file2",
    "two names exchanged": "mv file x; mv sub/other file; mv x sub/other",
    "another hard link": "ln file sub/again",
    "a file gone": "rm link",
    "a file of the image gone": "rm /etc/issue",
    "a file of the image touched": "touch /etc/issue",
    "a folder made and removed": "mkdir sub/x; rmdir sub/x",
    "a file in memory": "echo > /dev/shm/x",
    "a background process": "sleep 1000 > /dev/null 2>&1 &",
    "a device gone, a file in its place": "rm /dev/full; echo hidden > /dev/full",
    "only a device's mode": "chmod 600 /dev/null",
    "only a device's owner": "chown 1:1 /dev/zero",
    "another device under the name": "rm /dev/random; mknod -m 666 /dev/random c 1 9",
    "another link in /dev": "ln -sfn /proc/self/fd/1 /dev/stderr",
    "only the mode of a folder in memory": "chmod 700 /dev/shm",
    "only the mode of /dev": "chmod 700 /dev",
    "only a terminal's mode": "chmod 600 /dev/pts/ptmx",
    "a file where cgroups are mounted": "echo > /sys/fs/cgroup/x || echo > /dev/shm/x",  # read-only in version 2
    "System V memory": "python3 -c 'import ctypes; ctypes.CDLL(None).shmget(77, 4096, 0o1600)'",
    "System V semaphores": "python3 -c 'import ctypes; ctypes.CDLL(None).semget(77, 1, 0o1600)'",
    "a System V queue": "python3 -c 'import ctypes; ctypes.CDLL(None).msgget(77, 0o1600)'",
    "process 1's processors": "python3 -c 'import os; os.sched_setaffinity(1, {0})'",
    "process 1's scheduling": "python3 -c 'import os; os.sched_setscheduler(1, os.SCHED_BATCH, os.sched_param(0))'",
    "process 1's nice value": "python3 -c 'import os; os.setpriority(os.PRIO_PROCESS, 1, 5)'",
    "process 1's I/O priority": "ionice -c 3 -p 1",
    "process 1's OOM score": "echo 500 > /proc/1/oom_score_adj",
    "process 1's core dump filter": "echo 7 > /proc/1/coredump_filter",
    "a limit of process 1": "python3 -c 'import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (512, 512))'",
}


async def settled(live: Live) -> str:
    """Two captures after which only something new can make a third one necessary (see `believed_until`)."""
    await live.sh(FILES)
    await live.checkpoint()
    await live.sh("sleep 0.05")
    return await live.checkpoint()


async def held_by(live: Live, since: str) -> str:
    report = await live.bench.host.checkpoint(live.incarnation, live.bench.name(), live.number, since)
    return report.held_by


async def test_actions_that_only_look_need_no_checkpoint(bench: Bench) -> None:
    live = await bench.create()
    first = await settled(live)
    await live.sh(ONLY_LOOKS)
    assert await held_by(live, first) == first
    await live.sh("true")
    before = await bench.host.checkpoints()
    assert await held_by(live, first) == first
    assert await bench.host.checkpoints() == before


@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_is_seen(bench: Bench, change: str) -> None:
    live = await bench.create()
    first = await settled(live)
    await live.sh(CHANGES[change])
    assert await held_by(live, first) == ""


async def test_what_somebody_makes_between_the_question_and_the_freeze(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what the runner said counts, but what there is in the freeze."""
    live = await bench.create()
    await live.sh("echo > f")
    prepare = LayerCapture.prepare
    code = "import ctypes; print(ctypes.CDLL(None).shmget(77, 4096, {}) >= 0)"

    def meanwhile(self: LayerCapture, mapped: Collection[int] = ()) -> None:
        prepare(self, mapped)
        make = ["docker", "exec", live.incarnation.name, "python3", "-c", code.format("0o1600")]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)

    with monkeypatch.context() as patch:
        patch.setattr(LayerCapture, "prepare", meanwhile)
        name = await live.checkpoint()
    back = await live.kill_and_restore(name)
    assert await back.sh(f"python3 -c '{code.format(0)}'") == "True\n"


async def test_only_memory_of_a_background_process(bench: Bench) -> None:
    live = await bench.create()
    await live.sh("mkfifo poke; (n=0; exec 3<>poke; while read -u 3; do n=$((n+1)); done) > /dev/null 2>&1 &")
    first = await settled(live)
    await live.sh("echo > poke")
    assert await held_by(live, first) == ""


async def test_what_was_captured_with_a_process_does_not_describe_what_is_left(bench: Bench) -> None:
    live = await bench.create()
    await live.sh("sleep 1000 > /dev/null 2>&1 &")
    first = await settled(live)
    await live.sh("kill $(pgrep -x sleep)")
    assert await held_by(live, first) == ""


async def test_restored_at_the_later_boundary_the_runner_goes_on_from_there(bench: Bench) -> None:
    live = await bench.create()
    first = await settled(live)
    for _ in range(3):
        await live.sh(ONLY_LOOKS)
    assert await held_by(live, first) == first
    back = await live.kill_and_restore(first)
    assert await back.sandbox.ping() == back.number == 5
    with pytest.raises(SandboxFailedError, match="no longer kept"):
        await back.sandbox.run(Action(5, "echo again > file"))
    assert await back.sh("cat file") == "one\n"
    assert back.number == 6
    with pytest.raises(CheckpointRefusedError):
        await bench.host.checkpoint(back.incarnation, bench.name(), 5, first)


async def test_after_a_restore_the_checkpoint_goes_on_describing(bench: Bench) -> None:
    """Perhaps not at once, for starting a container may touch its layer; never when something has changed."""
    live = await bench.create()
    first = await settled(live)
    back = await live.kill_and_restore(first)
    await back.sh("cat file")
    name = bench.name()
    now = (await bench.host.checkpoint(back.incarnation, name, back.number, first)).held_by or name
    await back.sh("cat file")
    assert await held_by(back, now) == now
    await back.sh("echo >> file")
    assert await held_by(back, now) == ""


async def test_a_checkpoint_is_not_restored_at_a_boundary_that_it_cannot_hold(bench: Bench) -> None:
    live = await bench.create()
    quiet = await settled(live)
    await live.sh("sleep 1000 > /dev/null 2>&1 &")
    noisy = await live.checkpoint()
    for name, number in ((quiet, live.number - 2), (noisy, live.number + 1)):
        with pytest.raises(RestoreFailedError, match="holds action"):
            await bench.restore(name, number)


async def test_another_checkpoint_than_the_last_is_not_taken_for_it(bench: Bench) -> None:
    live = await bench.create()
    first = await settled(live)
    await live.sh("echo > more")
    await live.checkpoint()
    await live.sh("rm more")
    assert await held_by(live, first) == ""


def captured(upper: Path, target: Path, mapped: set[int] | None = None) -> Captured:
    target.mkdir()
    with LayerCapture(upper, target) as layer:
        layer.prepare()
        layer.settle(mapped or ())
        return layer.finish("c")


def test_what_was_mapped_at_the_capture_is_not_believed(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    (upper / "file").write_text("x")
    os.utime(upper / "file")
    assert not is_unchanged(upper, captured(upper, tmp_path / "one", {(upper / "file").stat().st_ino}))


def test_a_layer_that_was_filled_from_a_capture_is_it(tmp_path: Path) -> None:
    upper, other = tmp_path / "upper", tmp_path / "other"
    for folder in (upper, other):
        folder.mkdir()
        (folder / "file").write_text("x")
    known = rebase(other, captured(upper, tmp_path / "one"))
    assert is_unchanged(other, known) == (known.root is not None and not known.disbelieved)
    (other / "more").write_text("")
    assert not is_unchanged(other, known)
