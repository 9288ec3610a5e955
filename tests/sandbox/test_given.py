"""What a container writes into the files that Docker binds into it is its state, like its other files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from belayer.errors import CheckpointRefusedError
from belayer.sandbox.docker_host import open_host
from belayer.sandbox.fork import fork
from belayer.sandbox.given import LIMIT_BYTES, Edited, Given, edited, put, read
from belayer.sandbox.spares import PREFIX
from tests.sandbox.conftest import SPEC, Bench, Live, bench_of
from tests.sandbox.test_unchanged import held_by, settled

sandbox = pytest.mark.sandbox
KINDS = pytest.mark.parametrize(
    "background", ["", "tail -f /etc/hosts > /dev/null & "], ids=["quiet", "with a process"]
)
EDIT = (
    "echo 10.0.0.1 db >> /etc/hosts; echo nameserver 9.9.9.9 > /etc/resolv.conf; chmod 640 /etc/resolv.conf; "
    "chown 1:2 /etc/hostname; touch -d 2001-01-01 /etc/hostname"
)
LOOK = "cd /etc; cat hosts resolv.conf hostname; stat -c '%a %u %g %Y' resolv.conf hostname"
CHANGES = {
    "a name": "echo 10.0.0.1 db >> /etc/hosts",
    "a name server": "echo nameserver 9.9.9.9 > /etc/resolv.conf",
    "the host's name": "echo other > /etc/hostname",
    "only a mode": "chmod 600 /etc/hosts",
    "only an owner": "chown 1:1 /etc/resolv.conf",
    "only an mtime": "touch -d 2001-01-01 /etc/hosts",
    "only an xattr": 'python3 -c \'import os; os.setxattr("/etc/hosts", "user.a", b"b")\'',
}


@sandbox
@KINDS
async def test_edits_come_back_again_and_again(bench: Bench, background: str) -> None:
    live = await bench.create()
    await live.sh(background + EDIT)
    seen = await live.sh(LOOK)
    assert "10.0.0.1 db" in seen
    for _ in range(2):
        live = await live.kill_and_restore(await live.checkpoint())
        assert await live.sh(LOOK) == seen
    await live.sh("echo 10.0.0.2 cache >> /etc/hosts")
    live = await live.kill_and_restore(await live.checkpoint())
    assert await live.sh("grep -c -e db -e cache /etc/hosts") == "2\n"


@sandbox
async def test_into_a_spare_container(home: Path) -> None:
    async with open_host(home, spares=1) as host, bench_of(host) as bench:
        live = await bench.create()
        await live.sh(EDIT)
        seen = await live.sh(LOOK)
        name = await live.checkpoint()
        await host.spares_settled()
        assert [each for each in await host.incarnations(bench.run) if each.startswith(PREFIX)]
        back = await live.kill_and_restore(name)
        assert await back.sh(LOOK) == seen
        await host.spares_settled()
        again = await back.kill_and_restore(await back.checkpoint())
        assert await again.sh(LOOK) == seen


@sandbox
@KINDS
async def test_in_every_copy(bench: Bench, background: str) -> None:
    live = await bench.create()
    await live.sh(background + EDIT)
    copies = {f"{bench.run}-t{n}": bench.name() for n in range(2)}
    made = await fork(bench.host, bench.run, await live.checkpoint(), live.number, SPEC, copies)
    for here in made.values():
        copy = Live(bench, await bench.host.attach(here), live.number)
        assert await copy.sh(LOOK) == await live.sh(LOOK)


@sandbox
@KINDS
async def test_on_the_bridge_the_own_address_is_the_new_one(bench: Bench, background: str) -> None:
    spec = msgspec.structs.replace(SPEC, network="bridge")
    live = await bench.create(spec)
    await live.sh(f"{background.replace('tail -f /etc/hosts', 'sleep 1000')}echo 10.0.0.1 db >> /etc/hosts")
    beside = await bench.restore(await live.checkpoint(), live.number, spec)
    own = "set -- $(grep sandbox /etc/hosts); echo $1; grep -cw db /etc/hosts; hostname -i"
    assert await beside.sh("grep -c sandbox /etc/hosts") == "1\n"
    for each in (live, beside):
        address, count, seen = (await each.sh(own)).split()
        assert (address, count) == (seen, "1")


@sandbox
@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_is_a_change(bench: Bench, change: str) -> None:
    live = await bench.create()
    first = await settled(live)
    await live.sh(CHANGES[change])
    assert await held_by(live, first) == ""
    second = await live.checkpoint()
    await live.sh("cat /etc/hosts")
    assert await held_by(live, second) == second
    back = await live.kill_and_restore(second)
    third = await back.checkpoint()
    await back.sh("cat /etc/hosts")
    assert await held_by(back, third) == third


@sandbox
async def test_what_is_too_large_is_refused_by_name(bench: Bench) -> None:
    live = await bench.create()
    await live.sh(f"truncate -s {LIMIT_BYTES + 1} /etc/hosts")
    with pytest.raises(CheckpointRefusedError, match="/etc/hosts holds"):
        await live.checkpoint()
    await live.sh("echo > /etc/hosts")
    await live.checkpoint()


def given(data: bytes) -> Given:
    return Given(data, 0o644, 0, 0, 1, {})


def test_only_lines_of_dockers_become_the_new_containers() -> None:
    before = {"hosts": given(b"127.0.0.1\tlocalhost\n172.17.0.2\tsandbox\n"), "hostname": given(b"sandbox\n")}
    after = {"hosts": given(b"127.0.0.1\tlocalhost\n172.17.0.31\tsandbox\n"), "hostname": given(b"sandbox\n")}
    mine = given(b"172.17.0.2\tsandbox\n172.17.0.2 mine\n")
    found = edited(before, before | {"hosts": mine})
    assert list(found.files) == ["hosts"]
    again = Edited.decode(found.encode()).here(after)
    assert again == after | {"hosts": given(b"172.17.0.31\tsandbox\n172.17.0.2 mine\n")}
    assert edited(before, before).files == {}


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "hosts").symlink_to("secret")
    with pytest.raises(OSError):
        read(tmp_path)
    with pytest.raises(OSError):
        put(tmp_path, {"hosts": given(b"mine")})
    assert (tmp_path / "secret").read_text() == "secret"
    assert read(tmp_path, ["/etc/hosts"]) == {}
