"""Processes that are out of the ordinary: what they are and hold comes back, and what cannot is named."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from belayer.errors import CheckpointRefusedError
from belayer.processes import start_ticks
from belayer.sandbox import obstacles, watches
from belayer.sandbox.freezer import freezer_of
from belayer.sandbox.limits import Bounds
from belayer.sandbox.manifest import read_manifest
from belayer.sandbox.protocol import Incarnation
from belayer.sandbox.tree import described
from tests.sandbox.conftest import IMAGE, Bench
from tests.sandbox.test_traps import processes, start
from tests.waiting import until

pytestmark = pytest.mark.sandbox


SHELL = """
p, fd = pty.fork()
if not p: os.execv("/bin/bash", ["bash", "--norc", "-i"])
os.write(fd, b"answer=$((40 + 1))\\n"); wait(); os.write(fd, b"echo got-$((answer + 1))\\n")
seen = b""
while b"got-42" not in seen: seen += os.read(fd, 999)
say("got-42")
"""


UNREAD = """
fd = libc.inotify_init1(0)
libc.inotify_add_watch(fd, b"/testbed", 0x100)
os.close(os.open("made", os.O_CREAT))
wait()
said = b""
while b"made" not in said: said += os.read(fd, 999)
say("told")
"""


async def test_what_inotify_has_told_is_read_before_the_freeze(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process reads when it is let go on for the first time."""
    live = await bench.create()
    await start(live, "unread", UNREAD)
    (watching,) = [pid for pid in processes(live) if "python3 unread.py" in described(pid)]
    assert watches.has_unread([watching])
    wait = Bounds.wait

    def poked(self: Bounds, duration_s: float) -> None:
        os.kill(watching, signal.SIGUSR1)
        while watches.has_unread([watching]):
            wait(self, duration_s)

    monkeypatch.setattr(Bounds, "wait", poked)
    back = await live.kill_and_restore(await live.checkpoint())
    await back.sh("until [ -e unread.out ]; do sleep 0.01; done")
    assert await back.sh("cat unread.out") == "told"


async def test_who_never_reads_it_stops_nobody(bench: Bench) -> None:
    live = await bench.create()
    await start(live, "unread", UNREAD)
    await live.kill_and_restore(await live.checkpoint())


async def test_a_shell_in_a_terminal_of_its_own(bench: Bench) -> None:
    """As tmux, script and pexpect make it: the terminal's end in the shell was never opened by name."""
    live = await bench.create()
    await start(live, "shell", SHELL)
    back = await live.kill_and_restore(await live.checkpoint())
    await back.sh("pkill -USR1 -f '^python3 shell'; until [ -e shell.out ]; do sleep 0.01; done")
    assert await back.sh("cat shell.out") == "got-42"


async def test_processes_that_are_not_roots(bench: Bench) -> None:
    live = await bench.create()
    await start(live, "nobody", "os.chmod('.', 0o777); os.setgid(65534); os.setuid(65534); wait(); say(os.getuid())")
    if obstacles._has_capability(obstacles.CAP_SYS_RESOURCE):
        back = await live.kill_and_restore(await live.checkpoint())
        await back.sh("pkill -USR1 -f '^python3'; until [ -e nobody.out ]; do sleep 0.01; done")
        assert await back.sh("cat nobody.out") == "65534"
    else:
        with pytest.raises(CheckpointRefusedError, match="CAP_SYS_RESOURCE"):
            await live.checkpoint()


@pytest.mark.parametrize("name", ["/dev/shm/$'\\xff'", "/dev/$'\\xfe\\n'"])
async def test_what_makes_it_unquiet_has_a_name_of_any_bytes(bench: Bench, name: str) -> None:
    live = await bench.create()
    await live.sh(f"echo kept > {name}")
    back = await live.kill_and_restore(await live.checkpoint())
    assert await back.sh(f"cat {name}") == "kept\n"


@pytest.fixture
async def may_unshare() -> AsyncIterator[Incarnation]:
    """A container, none of ours, whose processes may make namespaces, as ours may not."""
    name = f"belayer-test-{os.urandom(4).hex()}"
    command = "unshare --user sleep 1000 & sleep 1000 & wait"
    await docker("run", "-d", "--name", name, "--security-opt", "seccomp=unconfined", IMAGE, "bash", "-c", command)
    try:
        pid = int(await docker("inspect", "-f", "{{.State.Pid}}", name))
        yield Incarnation(name, "", "", "", pid, start_ticks(pid))
    finally:
        await docker("rm", "-f", name)


async def docker(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec("docker", *arguments, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode().strip()


async def test_a_user_namespace_is_an_obstacle(may_unshare: Incarnation) -> None:
    init = may_unshare.pid
    freezer = freezer_of(init)
    assert freezer is not None

    def unshared() -> list[int]:
        own = Path(f"/proc/{init}/ns/user").readlink()
        return [pid for pid in freezer.processes() if Path(f"/proc/{pid}/ns/user").readlink() != own]

    (pid,) = await until(unshared)
    processes = freezer.processes()
    assert obstacles.obstacle(init, processes) == (pid, "it has a user namespace of its own")
    others = [process for process in processes if process != pid]
    assert obstacles.obstacle(init, others) is None


THREADS = """
import os, threading, time
def pinned():
    os.sched_setaffinity(0, {0})
    open("up", "w").close()
    time.sleep(9999)
threading.Thread(target=pinned, daemon=True).start()
time.sleep(9999)
"""
GIVE = (
    "python3 -c 'import os; os.sched_setaffinity(PID, {0})'; ionice -c 3 -p PID; echo 7 > /proc/PID/coredump_filter; "
    "echo 500 > /proc/PID/oom_score_adj; python3 -c 'import os; os.setpriority(os.PRIO_PROCESS, PID, 5)'"
)
SEEN = (
    "for p in 1 $(pgrep -x sleep) $(pgrep -f '[t]hreads.py'); do for t in /proc/$p/task/*; do "
    "grep Cpus_allowed: $t/status; ionice -p ${t##*/}; done; cat /proc/$p/coredump_filter /proc/$p/oom_score_adj; "
    "cut -d ' ' -f 19 /proc/$p/stat; done"
)


async def test_what_criu_does_not_keep_comes_back(bench: Bench) -> None:
    """Of process 1, hence of later actions; of another process; of single threads."""
    live = await bench.create()
    await live.sh(f"cat > threads.py <<'END'\n{THREADS}\nEND")
    await live.sh("python3 threads.py & sleep 1000 & until [ -e up ]; do sleep 0.01; done")
    usual = await live.sh(SEEN)
    for pid in ("1", (await live.sh("pgrep -x sleep")).strip()):
        await live.sh(GIVE.replace("PID", pid))
    before = await live.sh(SEEN)
    assert before != usual
    for _ in range(2):
        live = await live.kill_and_restore(await live.checkpoint())
        assert await live.sh(SEEN) == before


async def test_when_the_processes_have_ended_a_restored_container_is_quiet(bench: Bench) -> None:
    live = await bench.create()
    await live.sh("sleep 1000 &")
    back = await live.kill_and_restore(await live.checkpoint())
    await back.sh("kill $(pgrep -x sleep); while pgrep -x sleep; do sleep 0.01; done")
    assert read_manifest(bench.host.checkpoint_path(await back.checkpoint())).noise == ""
