"""What a SandboxSpec can ask for, before and after a restore, with processes and without."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from belayer.errors import CheckpointRefusedError, InputError
from belayer.journal.events import SandboxSpec
from belayer.sandbox import obstacles, options
from belayer.sandbox.manifest import read_manifest
from tests.sandbox.conftest import IMAGE, Bench, Live

pytestmark = pytest.mark.sandbox
KINDS = pytest.mark.parametrize("background", ["", "sleep 1000 & "], ids=["quiet", "with a process"])


async def again(bench: Bench, live: Live, spec: SandboxSpec) -> Live:
    """The container removed and brought back."""
    checkpoint = await live.checkpoint()
    await live.sandbox.close()
    await bench.host.remove(live.incarnation.name)
    return await bench.restore(checkpoint, live.number, spec)


@KINDS
async def test_read_only_with_a_folder_in_memory(bench: Bench, background: str) -> None:
    spec = SandboxSpec(IMAGE, workdir="/tmp", read_only=True, tmpfs=("/tmp", "/run"))
    live = await bench.create(spec)
    for _ in range(2):
        assert "Read-only" in await live.sh("touch /testbed/x 2>&1", status=1)
        live = await again(bench, live, spec)
    await live.sh(f"{background}echo kept > /tmp/file; mkdir /run/deep")
    live = await again(bench, live, spec)
    assert await live.sh("cat /tmp/file; ls /run; pgrep -c sleep || true") == (
        f"kept\ndeep\n{1 if background else 0}\n"
    )
    assert "Read-only" in await live.sh("touch /testbed/x 2>&1", status=1)


@pytest.fixture
async def volume(bench: Bench) -> AsyncIterator[str]:
    """The name of a volume of Docker's."""
    name = f"belayer-{bench.run}"
    yield name
    await bench.host.remove_run(bench.run)
    await asyncio.to_thread(subprocess.run, ["docker", "volume", "rm", name], check=True, stdout=subprocess.DEVNULL)


@KINDS
async def test_binds_are_mounted_and_left_out(bench: Bench, volume: str, tmp_path: Path, background: str) -> None:
    shown, memory = tmp_path / "shown", tmp_path / "memory"
    for folder in (shown, memory):
        folder.mkdir()
    (shown / "given").write_text("before\n")
    spec = SandboxSpec(IMAGE, workdir="/testbed", binds=(f"{shown}:/data:ro", f"{volume}:/vol", f"{memory}:/mem"))
    live = await bench.create(spec)
    await live.sh(f"{background}cat /data/given > copy; echo one > /vol/file; echo one > /mem/file")
    assert "Read-only" in await live.sh("touch /data/x 2>&1", status=1)
    name = bench.name()
    report = await bench.host.checkpoint(live.incarnation, name, live.number)
    assert report.not_captured == ("/data", "/mem", "/vol")
    assert read_manifest(bench.host.checkpoint_path(name)).not_captured == ("/data", "/mem", "/vol")
    (shown / "given").write_text("after\n")
    live = await again(bench, live, spec)
    assert await live.sh("cat copy /data/given /vol/file /mem/file") == "before\nafter\none\none\n"
    assert "Read-only" in await live.sh("touch /data/x 2>&1", status=1)


@pytest.fixture
def whole_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of which all is mounted into the container."""
    subprocess.run(["mount", "-t", "tmpfs", "none", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


async def test_a_whole_disk_is_the_hosts_all_the_same(bench: Bench, whole_disk: Path) -> None:
    spec = SandboxSpec(IMAGE, workdir="/testbed", binds=(f"{whole_disk}:/disk",))
    live = await bench.create(spec)
    await live.sh("sleep 1000 & echo one > /disk/file")
    (whole_disk / "file").write_text("two\n")
    live = await again(bench, live, spec)
    assert await live.sh("cat /disk/file; pgrep -c sleep") == "two\n1\n"


@pytest.mark.parametrize("user", ["nobody", "1234", "1234:56"])
async def test_actions_run_as_a_user(bench: Bench, user: str) -> None:
    spec = SandboxSpec(IMAGE, workdir="/tmp", user=user)
    expected = {"nobody": "65534:65534 65534\n", "1234": "1234:0 0\n", "1234:56": "1234:56 56\n"}[user]
    live = await bench.create(spec)
    assert await live.sh('echo "$(id -u):$(id -g) $(id -G)"') == expected
    await live.sh("echo mine > file; ! touch /testbed/x 2> /dev/null")
    live = await again(bench, live, spec)
    assert await live.sh('echo "$(id -u):$(id -g) $(id -G)"') == expected
    await live.sh("echo more >> file; [ -O file ]; kill -0 1", status=1)
    if not obstacles._has_capability(obstacles.CAP_SYS_RESOURCE):
        await live.sh("sleep 1000 &")
        with pytest.raises(CheckpointRefusedError, match="CAP_SYS_RESOURCE"):
            await live.checkpoint()


PRIVILEGES = "grep -hE '^(CapInh|CapPrm|CapEff|CapBnd|Seccomp|NoNewPrivs)' /proc/1/status /proc/self/status"


@KINDS
async def test_capabilities_and_the_seccomp_filter_hold(bench: Bench, background: str) -> None:
    spec = SandboxSpec(IMAGE, workdir="/tmp", cap_drop=("ALL",), cap_add=("CHOWN", "SYS_PTRACE"))
    live = await bench.create(spec)
    mask = (1 << 0) | (1 << 19)
    seen = await live.sh(PRIVILEGES)
    assert re.findall("CapBnd:\t(.*)", seen) == [f"{mask:016x}"] * 2
    assert re.findall("Seccomp:\t(.*)", seen) == ["2", "2"], "Docker's default filter"
    await live.sh(f"{background}touch owned; chown 5:5 owned")
    for _ in range(2):
        live = await again(bench, live, spec)
        assert await live.sh(PRIVILEGES) == seen
        assert "Operation not permitted" in await live.sh("mknod device c 1 3 2>&1", status=1), "MKNOD is dropped"
        assert "not permitted" in await live.sh("unshare --user true 2>&1", status=1), "the filter is at work"
        await live.sh("chown 6:6 owned")
    if background:
        held = await live.sh("grep -E '^(CapBnd|Seccomp)' /proc/$(pgrep sleep)/status")
        assert re.findall(":\t(.*)", held)[:2] == [f"{mask:016x}", "2"], "of the process that was restored"


@KINDS
async def test_the_processor_limit_holds(bench: Bench, background: str) -> None:
    spec = SandboxSpec(IMAGE, workdir="/testbed", cpus=1.5)
    live = await bench.create(spec)
    v1 = "/sys/fs/cgroup/cpu/cpu.cfs_{quota,period}_us"
    look = f"cat /sys/fs/cgroup/cpu.max 2> /dev/null || echo $(cat {v1})"
    assert await live.sh(look) == "150000 100000\n"
    await live.sh(f"{background}true")
    for _ in range(2):
        live = await again(bench, live, spec)
        assert await live.sh(look) == "150000 100000\n"


async def test_a_user_cannot_speak_for_the_host_or_the_runner(bench: Bench, home: Path) -> None:
    spec = SandboxSpec(IMAGE, workdir="/tmp", user="nobody")
    live = await bench.create(spec)
    control = "/.belayer/control"
    attempts = [
        f"ls {control}",
        f"touch {control}/request-0000-000001",
        f"touch {control}/reply-0000-000001",
        f"echo x > {control}/doorbell",
        f"mv {control}/idle-1 {control}/idle-7",
        f"rm -rf {control}/doorbell",
        f"ln -s /etc {control}/link",
        f"mount -o remount,rw {control}",
        f"mv {control} /tmp/away",
        "echo x >> /.belayer/runner.py",
        "touch /.belayer/x",
        "echo x > /proc/1/comm",
        "head -c 1 /proc/1/environ",
        "kill -USR1 1",
    ]
    for _ in range(2):
        for attempt in attempts:
            seen = await live.sh(f"({attempt}) 2>&1; exit $(($? == 0))")
            assert re.search("denied|not permitted|must be superuser", seen, re.IGNORECASE), seen
        names = {path.name for path in (home / "run" / live.incarnation.name / "shared/control").iterdir()}
        kinds = {name.partition("-")[0] for name in names}
        assert kinds <= {"doorbell", "idle", "busy", "bell"}, names
        live = await again(bench, live, spec)


CONNECT = "import socket; s = socket.create_connection(('{address}', {port})); open('up', 'w'); s.recv(1)"


async def gateway_of(live: Live) -> str:
    """The address of the bridge's end on the host."""
    gateway = (await live.sh("awk '$2 == \"00000000\" {print $3}' /proc/net/route")).strip()
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(gateway)))


async def test_the_bridge(bench: Bench) -> None:
    spec = SandboxSpec(IMAGE, workdir="/testbed", network="bridge")
    live = await bench.create(spec)
    look = "cat /proc/net/dev | grep -c eth0; awk '$2 == \"00000000\"' /proc/net/route | wc -l"
    assert await live.sh(look) == "1\n1\n"
    await live.sh("sleep 1000 &")
    live = await again(bench, live, spec)
    assert await live.sh(look) == "1\n1\n"
    address = await gateway_of(live)
    server = await asyncio.start_server(lambda *_: None, address, 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        await live.sh(f'echo "{CONNECT.format(address=address, port=port)}" > connect.py')
        await live.sh("python3 connect.py & until [ -e up ]; do sleep 0.01; done")
        with pytest.raises(CheckpointRefusedError, match=f"a TCP connection with {address} port {port}, outside"):
            await live.checkpoint()
        await live.sh("pkill -f '^python3 connect'; while pgrep -f '^python3 connect'; do sleep 0.01; done")
        await live.checkpoint()


BRIDGE = SandboxSpec(IMAGE, workdir="/testbed", network="bridge")
PROCESS = """cat > process.py <<'END'
import os, socket, time
from socket import *
own = gethostbyname('sandbox')
with open('/proc/net/route') as routes:
    routes = [line.split() for line in routes]
gateway = inet_ntoa(bytes.fromhex(next(row[2] for row in routes if row[1] == '00000000'))[::-1])
{}
open('up', 'w').close()
while True:
    time.sleep(1000)
END
python3 process.py > log 2>&1 & for i in $(seq 500); do [ -e up ] && exit; sleep 0.01; done; cat log; exit 1
"""
TIED = {
    "closed by the far end": (
        "s = create_connection((gateway, {port})); assert s.recv(1) == b''",
        "TCP connection with .* port {port}, outside the container, from .* port",
    ),
    "listening": ("s = socket(); s.bind((own, 8000)); s.listen()", "TCP socket bound to .* port 8000"),
    "bound, no more": ("s = socket(); s.bind((own, 8000))", "a socket bound to 172.* port 8000"),
    "listening, in IPv6": (
        "s = socket(AF_INET6); s.bind(('::ffff:' + own, 8000)); s.listen()",
        "TCP socket bound to 172.* port 8000",
    ),
    "with itself": (
        "l = socket(); l.bind((own, 8000)); l.listen(); s = create_connection((own, 8000)); l.accept(); l.close()",
        "TCP connection with .* port",
    ),
    "not accepted": (
        "l = socket(); l.bind(('127.0.0.1', 8000)); l.listen(); s = create_connection(('127.0.0.1', 8000)); s.close()",
        "has not accepted a TCP connection from 127.0.0.1 port",
    ),
    "UDP": ("s = socket(type=SOCK_DGRAM); s.bind((own, 8001))", "UDP socket bound to .* port 8001"),
    "UDP, connected": ("s = socket(type=SOCK_DGRAM); s.connect((gateway, 53))", "UDP connection with .* port 53"),
    "raw": ("s = socket(type=SOCK_RAW, proto=IPPROTO_ICMP); s.bind((own, 0))", "RAW socket bound to"),
    "raw, connected": ("s = socket(type=SOCK_RAW, proto=IPPROTO_ICMP); s.connect((gateway, 0))", "RAW connection with"),
    "packets": ("s = socket(AF_PACKET, SOCK_RAW); s.bind(('eth0', 3))", "packet socket on network interface"),
}


async def test_what_hangs_on_the_containers_own_address_is_refused(bench: Bench) -> None:
    live = await bench.create(BRIDGE)
    address = await gateway_of(live)
    async with await asyncio.start_server(lambda _, writer: writer.close(), address, 0) as server:
        port = server.sockets[0].getsockname()[1]
        for script, cause in TIED.values():
            await live.sh(PROCESS.format(script.format(port=port)))
            with pytest.raises(CheckpointRefusedError, match=cause.format(port=port)) as refusal:
                await live.checkpoint()
            assert "python3 process.py" in refusal.value.process
            await live.sh("pkill -f '^python3 process'; rm up; while pgrep -f '^python3 process'; do sleep 0.01; done")
    await live.sh("sleep 1000 &")
    await bench.restore(await live.checkpoint(), live.number, BRIDGE)


async def test_loopback_and_wildcards_come_back_beside_the_original(bench: Bench) -> None:
    live = await bench.create(BRIDGE)
    script = """
l = socket(); l.bind(('', 8000)); l.listen(); u = socket(type=SOCK_DGRAM); u.bind(('', 8001))
m = socket(); m.bind(('127.0.0.2', 8002)); m.listen(); c = create_connection(('127.0.0.2', 8002)); a, _ = m.accept()
six = socket(AF_INET6); six.bind(('::', 8003)); six.listen(); o = create_connection((gateway, {port})); o.close()
a.close()
"""
    address = await gateway_of(live)
    async with await asyncio.start_server(lambda *_: None, address, 0) as server:
        await live.sh(PROCESS.format(script.format(port=server.sockets[0].getsockname()[1])))
        back = await bench.restore(await live.checkpoint(), live.number, BRIDGE)
    look = "python3 -c 'import socket; [socket.create_connection((\"127.0.0.1\", p), 5) for p in (8000, 8003)]'"
    await back.sh(look)
    await live.sh(look)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (SandboxSpec(IMAGE, network="host"), "'host'"),
        (SandboxSpec(IMAGE, user="nobody:"), "'nobody:'"),
        (SandboxSpec(IMAGE, binds=("/etc",)), "'/etc'"),
        (SandboxSpec(IMAGE, binds=("/etc:/data:rx",)), "'/etc:/data:rx'"),
        (SandboxSpec(IMAGE, binds=("/etc:/proc/x",)), "'/proc/x'"),
        (SandboxSpec(IMAGE, tmpfs=("/.belayer/control",)), "'/.belayer/control'"),
        (SandboxSpec(IMAGE, tmpfs=("/a/../dev",)), r"'/a/\.\./dev'"),
        (SandboxSpec(IMAGE, tmpfs=("/",)), "'/'"),
        (SandboxSpec(IMAGE, cap_add=("SYS_ADMIN",)), "'SYS_ADMIN'"),
        (SandboxSpec(IMAGE, cap_add=("ALL",)), "'ALL'"),
        (SandboxSpec(IMAGE, cap_drop=("CAP_KILL",)), "'CAP_KILL'"),
        (SandboxSpec(IMAGE, user="nobody", cap_drop=("ALL",), cap_add=("SETUID", "SETGID")), "'nobody' needs KILL"),
    ],
)
async def test_what_cannot_be_is_named_before_anything_is_made(bench: Bench, spec: SandboxSpec, named: str) -> None:
    with pytest.raises(InputError, match=named):
        await bench.create(spec)
    assert await bench.host.incarnations(bench.run) == []


def test_ordinary_specs_pass() -> None:
    options.check(SandboxSpec(IMAGE))
    options.check(SandboxSpec(IMAGE, user="1", cap_drop=("ALL", "MKNOD"), cap_add=("SETUID", "SETGID", "KILL")))
    options.check(SandboxSpec(IMAGE, user="1000:100", binds=("/a:/b", "v:/c:rw"), tmpfs=("/tmp",), network="bridge"))
