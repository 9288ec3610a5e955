"""What is too much is refused, with what was found and the limit; what is cancelled or late ends at once, wherever it
is: nothing is left of it and nothing is frozen."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from belayer.errors import CheckpointFailedError, CheckpointRefusedError
from belayer.sandbox import capture
from belayer.sandbox.captured import digest_of, file_digest, opened
from belayer.sandbox.docker_host import open_host
from belayer.sandbox.freezer import Freezer, freezer_of
from belayer.sandbox.layer import LayerCapture
from belayer.sandbox.limits import PIECE_BYTES, Bounds, Limits
from belayer.sandbox.scan import copy_entry
from tests.sandbox.conftest import Bench, Live, bench_of
from tests.waiting import DEADLINE_S, until

MB = 1 << 20
SMALL = Limits(layer_bytes=16 * MB, layer_entries=2000, frozen_bytes=MB, held_bytes=4 * MB)


class Meddling(Bounds):
    """Bounds with which something happens once, as the work is asked for the n-th time whether it is to go on."""

    def __init__(self, at: int, change: Callable[[], object], limits: Limits = SMALL) -> None:
        super().__init__("box", "checkpoint", limits)
        self._left = at
        self._change = change

    def go_on(self, _: int = 0) -> None:
        self._left -= 1
        if self._left == 0:
            self._change()
        super().go_on()


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    (tmp_path / "upper").mkdir()
    (tmp_path / "target").mkdir()
    return tmp_path / "upper"


def capture_of(upper: Path, bounds: Bounds) -> LayerCapture:
    return LayerCapture(upper, upper.parent / "target", bounds=bounds)


def write(path: Path, size_bytes: int) -> Path:
    path.write_bytes(os.urandom(MB) * (size_bytes // MB))
    return path


# --- sizes ---


def test_a_layer_of_too_many_entries_or_bytes(upper: Path) -> None:
    for number in range(2001):
        (upper / str(number)).touch()
    with capture_of(upper, Bounds("box", "checkpoint", SMALL)) as layer:
        with pytest.raises(CheckpointRefusedError, match=r"2,001 files and folders or more, the limit is 2,000"):
            layer.prepare()
        (upper / "0").unlink()
        layer.prepare()
    write(upper / "1", 17 * MB)
    large = pytest.raises(CheckpointRefusedError, match=r"layer holds 17,8\d\d,\d\d\d bytes, the limit is 16,777,216")
    with capture_of(upper, Bounds("box", "checkpoint", SMALL)) as layer, large:
        layer.prepare()


def test_a_file_that_grows_beyond_the_limit_as_it_is_copied(upper: Path) -> None:
    path = write(upper / "grows", MB)
    with capture_of(upper, Meddling(3, lambda: write(path, 17 * MB))) as layer:
        layer.look()
        with pytest.raises(CheckpointRefusedError, match="the limit is 16,777,216"):
            layer.prepare()
    assert (upper.parent / "target" / "grows").stat().st_blocks == 0


# --- frozen time ---


def test_what_would_be_copied_frozen_is_measured_first(upper: Path) -> None:
    (upper / "other").write_text("other")
    path = write(upper / "log", MB)
    with capture_of(upper, Bounds("box", "checkpoint", SMALL)) as layer:
        layer.prepare()
        write(path, 3 * MB)
        with pytest.raises(
            CheckpointRefusedError, match=r"/log grew by 2,097,152 bytes .* the limit is 1,048,576"
        ) as no:
            layer.settle(())
    assert no.value.incarnation == "box"
    assert (upper.parent / "target" / "log").stat().st_size == MB


def test_what_changes_meanwhile_is_copied_before_the_freeze(upper: Path) -> None:
    write(upper / "large", 8 * MB)
    path = write(upper / "zlog", 2 * MB)
    with capture_of(upper, Meddling(6, lambda: write(path, 3 * MB))) as layer:
        layer.prepare()
        assert (upper.parent / "target" / "zlog").stat().st_size == 3 * MB
        assert layer.settle(()) == 0
        layer.finish("checkpoint")
    assert digest_of(upper) == digest_of(upper.parent / "target")


def test_what_never_rests_is_refused_before_the_freeze(upper: Path) -> None:
    path = write(upper / "mapped", 2 * MB)
    refusal = pytest.raises(CheckpointRefusedError, match=r"/mapped changed while it was copied; 2,\d+,\d+ bytes")
    with capture_of(upper, Bounds("box", "checkpoint", SMALL)) as layer, refusal:
        layer.prepare(lambda: {path.stat().st_ino})


def test_what_was_quiet_and_is_not_is_prepared_again(upper: Path) -> None:
    write(upper / "large", 2 * MB)
    (upper / "file").write_text("x")
    with capture_of(upper, Bounds("box", "checkpoint", SMALL)) as layer:
        layer.prepare()
        (upper / "file").rename(upper / "moved")
        layer.prepare()
        assert layer.settle(()) == 1
        layer.finish("checkpoint")
    assert digest_of(upper) == digest_of(upper.parent / "target")


# --- the end ---


def test_a_large_file_is_left_in_the_middle(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write(source / "large", 3 * PIECE_BYTES)
    asked: list[int] = []

    def step(size_bytes: int) -> None:
        asked.append(size_bytes)
        if len(asked) == 2:
            raise CheckpointFailedError("checkpoint", "it was cancelled")

    with opened(source) as here, opened(tmp_path) as there, pytest.raises(CheckpointFailedError):
        copy_entry(here, there, b"large", (source / "large").stat(), step)
    assert (tmp_path / "large").stat().st_blocks * 512 <= PIECE_BYTES + MB
    asked.clear()
    with pytest.raises(CheckpointFailedError):
        file_digest(source / "large", step)
    assert len(asked) == 2


@pytest.mark.parametrize("before", ["prepare", "settle", "finish"])
def test_every_step_of_a_layer_ends_when_it_is_cancelled(upper: Path, before: str) -> None:
    (upper / "file").write_text("x")
    bounds = Bounds("box", "checkpoint")
    with capture_of(upper, bounds) as layer:
        steps = {"prepare": layer.prepare, "settle": lambda: layer.settle(()), "finish": lambda: layer.finish("name")}
        for name, step in steps.items():
            if name == before:
                bounds.cancel()
                with pytest.raises(CheckpointFailedError, match="it was cancelled"):
                    step()
                return
            step()


def test_late_is_told_with_the_time(upper: Path) -> None:
    late = pytest.raises(CheckpointFailedError, match=r"took longer than 0\.0 s")
    with capture_of(upper, Bounds("box", "checkpoint", Limits(checkpoint_s=0.0))) as layer, late:
        layer.prepare()


# --- with containers ---


@asynccontextmanager
async def limited(home: Path, limits: Limits) -> AsyncIterator[Bench]:
    async with open_host(home, spares=0, limits=limits) as host, bench_of(host) as made:
        yield made


async def refused(live: Live, match: str, hold: bool = False) -> None:
    """The checkpoint is refused, leaves nothing, and the container goes on."""
    name = live.bench.name()
    with pytest.raises(CheckpointRefusedError, match=match):
        await live.bench.host.checkpoint(live.incarnation, name, live.number, hold=hold)
    await left_nothing(live, name)


async def left_nothing(live: Live, name: str) -> None:
    assert not freezer(live).freezing
    folder = live.bench.host.checkpoint_path(name).parent
    assert [entry.name for entry in folder.iterdir() if name in entry.name] == []
    assert await live.sh("echo fine") == "fine\n"


def freezer(live: Live) -> Freezer:
    found = freezer_of(live.incarnation.pid)
    assert found is not None
    return found


@pytest.mark.sandbox
async def test_a_container_that_is_too_large(home: Path) -> None:
    limits = Limits(layer_bytes=8 * MB, memory_bytes=48 * MB, runner_state_bytes=60_000)
    async with limited(home, limits) as bench:
        live = await bench.create()
        await live.sh("head -c 9000000 /dev/urandom > large")
        await refused(live, r"its layer holds 9,\d+,\d+ bytes, the limit is 8,388,608")
        await live.sh("rm large; head -c 50000 /dev/zero")
        await refused(live, r"results of its last actions take \d+,\d+ bytes, the limit is 60,000")
        for _ in range(4):
            await live.sh("true")
        await live.checkpoint()
        await live.sh("""python3 -c "import signal; x = bytearray(b'x') * 60000000; open('up', 'w'); signal.pause()" &
            until [ -e up ]; do :; done""")
        await refused(live, r"its processes hold \d+,\d+,\d+ bytes, the limit is 50,331,648")


@pytest.mark.sandbox
@pytest.mark.parametrize("hold", [False, True])
async def test_a_file_that_never_rests(home: Path, hold: bool) -> None:
    async with limited(home, Limits(frozen_bytes=MB, held_bytes=MB)) as bench:
        live = await bench.create()
        await live.sh("""head -c 4000000 /dev/urandom > db
            python3 -c "if True:
                import mmap, signal
                file = open('db', 'r+')
                kept = mmap.mmap(file.fileno(), 0)
                open('up', 'w')
                signal.pause()" > /dev/null 2>&1 &
            until [ -e up ]; do :; done""")
        await refused(live, r"/testbed/db changed while it was copied; 4,[\d,]+ bytes would be copied", hold)


@pytest.mark.sandbox
async def test_cancelled_while_it_copies_frozen(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with limited(home, Limits()) as bench:
        live = await bench.create()
        await live.sh("for i in $(seq 10); do head -c 2000000 /dev/zero > f$i; done")
        name, copies = bench.name(), threading.Event()
        folder = bench.host.checkpoint_path(name).parent

        class Standing(Bounds):
            """Stands in the middle of the copy until it is cancelled, so that nobody need be quick."""

            def go_on(self, _: int = 0) -> None:
                if list(folder.glob(f".partial-{name}-*/layer/testbed/f*")):
                    copies.set()
                    assert self._cancelled.wait(DEADLINE_S)
                super().go_on()

        monkeypatch.setattr(capture, "Bounds", Standing)
        working = asyncio.ensure_future(bench.host.checkpoint(live.incarnation, name, live.number, hold=True))
        await until(copies.is_set, what="the copy to begin")
        assert freezer(live).freezing
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        await left_nothing(live, name)
