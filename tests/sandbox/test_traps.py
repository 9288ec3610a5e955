"""What processes may hold: it comes back as it was, or the checkpoint is refused before anything is frozen, by name."""

from __future__ import annotations

import base64
import ctypes
import os
import re
import socket

import pytest

from belayer.errors import CheckpointRefusedError
from belayer.sandbox import obstacles
from belayer.sandbox.freezer import freezer_of
from belayer.sandbox.tree import described, status_of
from tests.sandbox.conftest import Bench, Live
from tests.waiting import until

pytestmark = pytest.mark.sandbox

COMMON = """
import ctypes, fcntl, os, pty, select, signal, socket, struct, sys, threading, time
asked = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: asked.set())
libc = ctypes.CDLL(None, use_errno=True)
name = os.path.abspath(sys.argv[1])
def wait():
    open(name + '.up', 'w').close()
    while not asked.wait(0.01):
        pass
def say(value):
    with open(name + '.new', 'w') as file:
        file.write(str(value))
    os.rename(name + '.new', name + '.out')
"""
LISTEN = "s = socket.socket(); s.bind(('127.0.0.1', {port})); s.listen()\n"
CONNECT = "c = socket.create_connection(('127.0.0.1', {port})); a, _ = s.accept()\n"

WORKS = {
    "listening": (
        LISTEN.format(port=8001) + "wait()\n" + CONNECT.format(port=8001) + "c.send(b'hi'); say(a.recv(9))",
        "b'hi'",
    ),
    "established": (
        LISTEN.format(port=8002)
        + CONNECT.format(port=8002)
        + "c.send(b'before '); wait(); c.send(b'after'); s = b''\nwhile len(s) < 12: s += a.recv(12)\nsay(s)",
        "b'before after'",
    ),
    "bound-no-more": (
        "s = socket.socket(); s.bind(('127.0.0.1', 8004)); wait(); s.listen(); say(s.getsockname())",
        "('127.0.0.1', 8004)",
    ),
    "raw": (
        "s = socket.socket(type=socket.SOCK_RAW, proto=1); wait()\n"
        "s.sendto(b'\\x08\\0\\xf7\\xff\\0\\0\\0\\0', ('127.0.0.1', 0)); say(s.recv(99)[20:21])",
        "b'\\x08'",
    ),
    "udp": (
        "s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('127.0.0.1', 8003)); wait()\n"
        "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 8003)); say(s.recv(9))",
        "b'x'",
    ),
    "unix-sockets": (
        "a, b = socket.socketpair(); a.send(b'q'); s = socket.socket(socket.AF_UNIX); s.bind('sock'); s.listen()\n"
        "wait(); c = socket.socket(socket.AF_UNIX); c.connect('sock'); d, _ = s.accept(); c.send(b'z')\n"
        "say(b.recv(1) + d.recv(1))",
        "b'qz'",
    ),
    "inotify": (
        "os.mkdir('watched'); fd = libc.inotify_init(); libc.inotify_add_watch(fd, b'watched', 0x100)\n"
        "wait(); open('watched/new', 'w').close(); say(os.read(fd, 999)[16:19])",
        "b'new'",
    ),
    "inotify-anywhere": (
        "os.makedirs(b'/srv/deep/\\xff'); fd = libc.inotify_init(); open('/usr/local/one', 'w').close()\n"
        "places = [b'/srv/deep', b'/srv/deep/\\xff', b'/usr/share', b'/usr/local/one', b'/etc/hosts', b'/dev/shm']\n"
        "wds = [libc.inotify_add_watch(fd, place, 0x102) for place in places]; wait()\n"
        "for place in places[:3] + places[5:]: open(place + b'/new', 'w').close()\n"
        "open('/usr/local/one', 'a').write('x'); seen = os.read(fd, 9999)\n"
        "say(([wd in range(1, 7) for wd in wds], seen.count(b'new'), len(seen)))",
        "([True, True, True, True, True, True], 4, 144)",
    ),
    "timerfd": (
        "fd = libc.timerfd_create(1, 0); libc.timerfd_settime(fd, 0, struct.pack('qqqq', 999, 0, 999, 0), None)\n"
        "wait(); now = struct.pack('qqqq', 0, 10**7, 0, 10**7); libc.timerfd_settime(fd, 0, now, None)\n"
        "say([len(os.read(fd, 8)) for _ in range(3)])",
        "[8, 8, 8]",
    ),
    "file-locks": (
        "f = open('lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX); wait()\n"
        "try:\n    fcntl.flock(open('lock'), fcntl.LOCK_EX | fcntl.LOCK_NB); say('lost')\n"
        "except BlockingIOError: say('held')",
        "held",
    ),
    "large-deleted-file": (
        "f = open('big', 'w+b'); f.write(b'd' * 80_000_000); f.flush(); os.unlink('big'); wait()\n"
        "f.seek(0); say(f.read() == b'd' * 80_000_000)",
        "True",
    ),
    "deleted-hard-link": (
        "f = open('one', 'w+'); f.write('linked'); f.flush(); os.link('one', 'two'); os.unlink('one'); wait()\n"
        "f.seek(0); say((f.read(), os.path.exists('one'), open('two').read()))",
        "('linked', False, 'linked')",
    ),
    "deleted-folder": (
        "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); wait()\n"
        "say(os.readlink('/proc/self/cwd').endswith('gone (deleted)'))",
        "True",
    ),
    "memory-file": (
        "fd = os.memfd_create('m'); os.write(fd, b'mem'); wait(); os.lseek(fd, 0, 0); say(os.read(fd, 9))",
        "b'mem'",
    ),
    "dev-shm": (
        "f = open('/dev/shm/x', 'w+'); f.write('s' * 9999); f.flush(); wait(); f.seek(0); say(len(f.read()))",
        "9999",
    ),
    "500-threads": (
        "for _ in range(500): threading.Thread(target=time.sleep, args=(9999,), daemon=True).start()\n"
        "wait(); say(threading.active_count())",
        "501",
    ),
    "2000-files": (
        "files = [open('/etc/passwd') for _ in range(2000)]; [f.read(3) for f in files]\n"
        "wait(); say({f.tell() for f in files})",
        "{3}",
    ),
    "terminal": ("main, child = pty.openpty(); os.write(child, b'tty'); wait(); say(os.read(main, 9))", "b'tty'"),
    "polled-pipe": (
        "r, w = os.pipe(); e = select.epoll(); e.register(r); wait(); os.write(w, b'x'); say(len(e.poll(9)))",
        "1",
    ),
    "signal-descriptor": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]); mask = (ctypes.c_ulong * 16)(1 << 11)\n"
        "fd = libc.signalfd(-1, mask, 0); wait(); os.kill(os.getpid(), signal.SIGUSR2); say(len(os.read(fd, 128)))",
        "128",
    ),
    "zombie": (
        "p = os.fork()\nif p == 0: os._exit(7)\nwait(); say(os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]))",
        "7",
    ),
    "shared-mapping": (
        "import mmap; f = open('mapped', 'w+b'); f.truncate(1 << 20)\n"
        "m = mmap.mmap(f.fileno(), 1 << 20); m[:3] = b'abc'\n"
        "wait(); say((m[:3], open('mapped', 'rb').read(3)))",
        "(b'abc', b'abc')",
    ),
    "system-v-memory": ("i = libc.shmget(77, 4096, 0o1600); wait(); say(libc.shmget(77, 4096, 0) == i)", "True"),
    "names-of-any-bytes": (
        "import mmap; os.mkdir(b'\\xff'); os.chdir(b'\\xff'); f = open(b'\\xfe\\r0\\x0bUid:\\tx', 'w+b')\n"
        "f.truncate(1 << 20); m = mmap.mmap(f.fileno(), 1 << 20); libc.prctl(15, b'\\xff\\rPPid:\\tx', 0, 0, 0)\n"
        "wait(); f.seek(3); say((os.getcwdb()[-1:], f.tell(), open('/proc/self/comm', 'rb').read()))",
        "(b'\\xff', 3, b'\\xff\\rPPid:\\tx\\n')",
    ),
    "priority": ("os.nice(5); wait(); say(os.nice(0))", "5"),
    "no-user-namespace": ("r = libc.unshare(0x10000000); wait(); say(r)", "-1"),
}

REFUSED = {
    "io-uring": ("libc.syscall(425, 8, ctypes.create_string_buffer(256)); wait()", r"\[io_uring\] open"),
    "io-uring-closed": (
        "fd = libc.syscall(425, 8, ctypes.create_string_buffer(256)); libc.mmap(None, 4096, 3, 1, fd, 0)\n"
        "os.close(fd); wait()",
        r"\[io_uring\] mapped",
    ),
    "too-large-deleted-file": (
        "f = open('big', 'w+b'); os.posix_fallocate(f.fileno(), 0, (2 << 30) + 4096); os.unlink('big'); wait()",
        r"its file /testbed/big \(deleted\) takes 2,147,49",
    ),
    "too-large-deleted-file-mapped": (
        "import mmap; f = open('big', 'w+b'); os.posix_fallocate(f.fileno(), 0, (2 << 30) + 4096)\n"
        "m = mmap.mmap(f.fileno(), 4096); os.unlink('big'); f.close(); libc.close(3); libc.close(4); wait()",
        r"its file /testbed/big \(deleted\) takes 2,147,49",
    ),
    "inotify-deleted": (
        "f = open('gone', 'w'); fd = libc.inotify_init(); libc.inotify_add_watch(fd, b'gone', 2); os.unlink('gone')\n"
        "wait()",
        r"it watches inode \d+ with inotify, whose name was not found",
    ),
    "inotify-proc": (
        "fd = libc.inotify_init(); libc.inotify_add_watch(fd, b'/proc/1/status', 2); wait()",
        "it watches a file of proc with inotify",
    ),
    "ping": ("s = socket.socket(type=socket.SOCK_DGRAM, proto=1); wait()", "it has a ping socket"),
    "multicast": (
        "s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('', 5353))\n"
        "s.setsockopt(0, 35, socket.inet_aton('224.0.0.251') + socket.inet_aton('127.0.0.1')); wait()",
        "multicast group 224.0.0.251",
    ),
    "multicast-in-ipv6": (
        "s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)\n"
        "s.setsockopt(41, 20, socket.inet_pton(socket.AF_INET6, 'ff02::fb') + struct.pack('I', 1)); wait()",
        "multicast group ff02::fb",
    ),
    "ptrace": (
        "p = os.fork()\nif p == 0: select.select([], [], [])\nlibc.ptrace(16, p, 0, 0); wait()",
        "another process traces it",
    ),
    "ticked-timerfd": (
        "fd = libc.timerfd_create(1, 0); libc.timerfd_settime(fd, 0, struct.pack('qqqq', 0, 10**7, 0, 10**7), None)\n"
        "select.select([fd], [], []); wait()",
        "timerfd of it has ticked",
    ),
    "stopped": (
        "p = os.fork()\nif not p: signal.pause()\nos.kill(p, 19); os.waitpid(p, os.WUNTRACED); wait()",
        r"it is stopped \(SIGSTOP",
    ),
    "message-queue": (
        "rt = ctypes.CDLL('librt.so.1'); rt.mq_open(b'/queue', 0o102, 0o600, None); wait(); rt.mq_unlink(b'/queue')",
        "POSIX message queues",
    ),
}


ALSO_REFUSED = {
    "semaphore": ("fd = os.eventfd(5, os.EFD_SEMAPHORE); wait()", "eventfd that is a semaphore"),
    "packets": ("r, w = os.pipe2(os.O_DIRECT); wait()", "pipe of packets"),
    "mptcp": ("s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262); wait()", "MPTCP socket.*GODEBUG"),
    "vsock": ("s = socket.socket(40, socket.SOCK_STREAM); wait()", "socket of family (40|AddressFamily.AF_VSOCK)"),
    "secret-memory": (
        "import mmap; fd = libc.syscall(447, 0); os.ftruncate(fd, 4096); m = mmap.mmap(fd, 4096); m[0] = 7\n"
        "os.close(fd); wait()",
        "secret memory",
    ),
    "program-in-memory": (
        "fd = os.memfd_create('sleep'); os.write(fd, open('/bin/sleep', 'rb').read()); p = os.fork()\n"
        "if not p: os.execve(fd, ['python3 program-in-memory.py', '9999'], {})\n"
        "while not os.readlink(f'/proc/{p}/exe').startswith('/memfd'): time.sleep(0.01)\n"
        "wait()",
        "runs a program from memory",
    ),
    "first-thread": ("threading.Thread(target=wait).start(); libc.pthread_exit(None)", "first thread has ended"),
}
"""Refused in the same way; looked at in one container."""


def machine_lacks() -> set[str]:
    """Those that this machine's kernel does not have."""
    lacking = set[str]()
    for name, kind in (("mptcp", (socket.AF_INET, socket.SOCK_STREAM, 262)), ("vsock", (40, socket.SOCK_STREAM, 0))):
        try:
            socket.socket(*kind).close()
        except OSError:
            lacking.add(name)
    secret = ctypes.CDLL(None).syscall(447, 0)
    if secret < 0:
        return lacking | {"secret-memory"}
    os.close(secret)
    return lacking


async def start(live: Live, name: str, script: str) -> None:
    source = base64.b64encode((COMMON + script + "\n").encode()).decode()
    await live.sh(f"echo {source} | base64 -d > {name}.py; python3 {name}.py {name} > {name}.log 2>&1 &")
    await live.sh(f"for i in $(seq 5000); do [ -e {name}.up ] && exit; sleep 0.02; done; cat {name}.log; exit 1")


async def test_what_works(bench: Bench) -> None:
    live = await bench.create()
    for name, (script, _) in WORKS.items():
        await start(live, name, script)
    back = await live.kill_and_restore(await live.checkpoint())
    await back.sh("pkill -USR1 -f '^python3 .*[.]py'")
    for name in WORKS:
        await back.sh(f"until [ -e {name}.out ]; do sleep 0.01; done; true")
    said = {name: await back.sh(f"cat {name}.out") for name in WORKS}
    assert said == {name: expected for name, (_, expected) in WORKS.items()}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused(bench: Bench, name: str) -> None:
    script, cause = REFUSED[name]
    live = await bench.create()
    await start(live, name, script)
    checkpoint = bench.name()
    with pytest.raises(CheckpointRefusedError, match=cause) as refusal:
        await bench.host.checkpoint(live.incarnation, checkpoint, live.number)
    assert refusal.value.process
    assert checkpoint not in await bench.host.checkpoints()
    await live.sh(
        f"all=$(pgrep -f '^python3 {name}'); pkill -USR1 -f '^python3 {name}'; kill -KILL $all; "
        "rm -f /dev/mqueue/queue; for one in $all; do while [ -e /proc/$one ]; do sleep 0.01; done; done"
    )
    await live.kill_and_restore(await live.checkpoint())


async def test_what_else_is_seen(bench: Bench) -> None:
    live = await bench.create()
    refused = {name: ALSO_REFUSED[name] for name in ALSO_REFUSED if name not in machine_lacks()}
    for name, (script, _) in refused.items():
        await start(live, name, script)
    await until(lambda: any(map(is_dead, processes(live))), what="the end of a first thread")
    held = processes(live)
    for name, (_, cause) in refused.items():
        mine = [pid for pid in held if f"python3 {name}.py" in described(pid) or (is_dead(pid) and "thread" in name)]
        found = obstacles.obstacle(live.incarnation.pid, mine)
        assert found is not None and re.search(cause, found[1]), (name, found)
    rest = [pid for pid in held if described(pid).split()[1:2] != ["python3"] and not is_dead(pid)]
    assert obstacles.obstacle(live.incarnation.pid, rest) is None


def is_dead(pid: int) -> bool:
    return status_of(pid).get("State", "Z")[0] == "Z"


def processes(live: Live) -> list[int]:
    freezer = freezer_of(live.incarnation.pid)
    assert freezer is not None
    return freezer.processes()
