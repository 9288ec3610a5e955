"""The determinism probe: what a restore puts in place is compared with what was frozen, before any process runs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from belayer.errors import RestoreMismatchError
from belayer.sandbox.manifest import PROBE
from belayer.sandbox.probe import Probe, difference, take
from tests.sandbox.conftest import Bench, Live, change_image, change_note

pytestmark = pytest.mark.sandbox

KEEPER = """
cat > keeper.py <<'END'
import os, time
kept = bytearray(b"kept") * 2_000_000
file = open("/etc/passwd"); file.read(7)
os.chdir("/tmp"); os.mkfifo("ask")
while True:
    open("ask").read()
    open("/testbed/ran", "a").write(f"{kept.count(b'kept')}\\n")
    os.mkfifo("done"); open("done", "w").close(); os.unlink("done")
END
COLOUR=blue python3 keeper.py & until [ -p /tmp/ask ]; do :; done
"""


async def captured(bench: Bench) -> tuple[Live, Path]:
    """A live sandbox with a process, and the folder of its checkpoint."""
    live = await bench.create()
    await live.sh(KEEPER)
    return live, bench.host.checkpoint_path(await live.checkpoint())


async def test_what_is_known_of_a_process(bench: Bench) -> None:
    _, folder = await captured(bench)
    processes = Probe.decode((folder / PROBE).read_bytes()).processes
    (keeper,) = (facts for pid, facts in processes.items() if pid != 1)
    assert keeper["command"] == "python3 keeper.py "
    assert keeper["parent"] == "1"
    assert keeper["working directory"] == "/tmp"
    assert keeper["Uid"] == "0 0 0 0"
    assert any(value.startswith("/etc/passwd at ") for value in keeper.values())
    assert len([fact for fact in keeper if fact.startswith("page ")]) > 16
    assert processes[1]["parent"] == "0"


async def test_a_damaged_page_is_found_before_anything_runs(bench: Bench) -> None:
    live, folder = await captured(bench)
    (pages,) = (path for path in (folder / "images").glob("pages-*.img") if b"keptkept" * 999 in path.read_bytes())
    change_image(pages, pages.read_bytes().replace(b"keptkept" * 512, b"lostlost" * 512))
    with pytest.raises(RestoreMismatchError, match="of process") as failure:
        await bench.restore(folder.name, live.number)
    assert failure.value.what.startswith("page ")
    assert failure.value.expected != failure.value.found
    assert await bench.host.incarnations(bench.run) == [live.incarnation.name]
    assert await live.sh("cat ran || echo idle") == "cat: ran: No such file or directory\nidle\n"


@pytest.mark.parametrize(
    ("fact", "value"),
    [("working directory", "/elsewhere"), ("environment", "0" * 16), ("threads", "2"), ("memory map", "0" * 16)],
)
async def test_each_fact_counts(bench: Bench, fact: str, value: str) -> None:
    live, folder = await captured(bench)
    probe = Probe.decode((folder / PROBE).read_bytes())
    pid = max(probe.processes)
    was = probe.processes[pid][fact]
    other = {**probe.processes, pid: {**probe.processes[pid], fact: value}}
    change_note(folder / PROBE, msgspec.structs.replace(probe, processes=other).encode())
    with pytest.raises(RestoreMismatchError) as failure:
        await bench.restore(folder.name, live.number)
    assert (failure.value.what, failure.value.expected, failure.value.found) == (
        f"{fact} of process {pid}",
        value,
        was,
    )
    assert await bench.host.incarnations(bench.run) == [live.incarnation.name]


async def test_a_missing_and_a_strange_process_are_named() -> None:
    process = await asyncio.create_subprocess_exec("sleep", "1000")
    try:
        both = take([os.getpid(), process.pid])
        assert difference(both, [os.getpid()], memory=False) == (f"process {process.pid}", "there", "missing")
        one = take([process.pid])
        assert difference(one, [process.pid], memory=True) is None
        strange = difference(take([os.getpid()]), [os.getpid(), process.pid], memory=False)
        assert strange == (f"process {process.pid}", "none", "sleep 1000 ")
    finally:
        process.kill()
        await process.wait()


async def test_beyond_the_budget_only_ids_are_taken() -> None:
    found = take([os.getpid()], budget_s=0.0).processes
    assert [set(facts) for facts in found.values()] == [{"state", "parent", "group", "session", "threads"}]
