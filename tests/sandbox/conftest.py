"""Real Docker and CRIU, in a Belayer folder of the session's own, so that no other run's containers are seen."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from belayer.journal.events import SandboxSpec
from belayer.sandbox.docker_host import DockerHost, open_host
from belayer.sandbox.docker_sandbox import DockerSandbox
from belayer.sandbox.home import default_home
from belayer.sandbox.manifest import read_manifest, sizes_and_digests, write_manifest
from belayer.sandbox.protocol import Action, Incarnation
from belayer.sandbox.removal import remove_tree
from tests.waiting import DEADLINE_S

IMAGE = "belayer-base:bookworm"
SPEC = SandboxSpec(IMAGE, workdir="/testbed")


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("home")
    (made / "criu").symlink_to(default_home() / "criu")
    return made


@pytest.fixture
def emptied(tmp_path: Path) -> Iterator[Path]:
    """A folder that is emptied by us: pytest would recurse."""
    yield tmp_path
    for entry in tmp_path.iterdir():
        remove_tree(entry)


@pytest.fixture
async def host(home: Path) -> AsyncIterator[DockerHost]:
    async with open_host(home, spares=0) as opened:
        yield opened


@pytest.fixture
async def bench(host: DockerHost) -> AsyncIterator[Bench]:
    async with bench_of(host) as made:
        yield made


@asynccontextmanager
async def bench_of(host: DockerHost) -> AsyncIterator[Bench]:
    """A bench whose things are removed at the end."""
    made = Bench(host)
    try:
        yield made
    finally:
        await host.remove_run(made.run)


def change_image(image: Path, data: bytes) -> None:
    """Another content for one of CRIU's images, with the manifest's word for it: what CRIU might have got wrong."""
    image.write_bytes(data)
    manifest = read_manifest(image.parent.parent)
    images = manifest.images | sizes_and_digests([image])
    write_manifest(image.parent.parent, msgspec.structs.replace(manifest, images=images))


def change_note(note: Path, data: bytes) -> None:
    """The same for a file that we wrote."""
    note.write_bytes(data)
    manifest = read_manifest(note.parent)
    write_manifest(note.parent, msgspec.structs.replace(manifest, notes=manifest.notes | sizes_and_digests([note])))


class Bench:
    """One run with one trajectory: its containers and checkpoints, all removed at the test's end."""

    def __init__(self, host: DockerHost) -> None:
        self.host = host
        self.run = f"test-{os.urandom(4).hex()}"
        self.trajectory = f"{self.run}-t"
        self._count = 0

    def name(self) -> str:
        """A fresh name for an incarnation or a checkpoint."""
        self._count += 1
        return f"{self.run}-{self._count}"

    async def create(self, spec: SandboxSpec = SPEC) -> Live:
        made = await self.host.create(self.run, self.trajectory, self.name(), spec)
        return Live(self, await self.host.attach(made), 0)

    async def restore(self, checkpoint: str, number: int, spec: SandboxSpec = SPEC) -> Live:
        made = await self.host.restore(self.run, self.trajectory, self.name(), spec, checkpoint, number)
        return Live(self, await self.host.attach(made), number)


class Live:
    """A live sandbox whose actions are numbered for the test."""

    def __init__(self, bench: Bench, sandbox: DockerSandbox, number: int) -> None:
        self.bench = bench
        self.sandbox = sandbox
        self.number = number

    @property
    def incarnation(self) -> Incarnation:
        return self.sandbox.incarnation

    async def sh(self, command: str, status: int = 0, timeout_s: float = DEADLINE_S) -> str:
        """Run the next action; its output. The exit status must be the expected one."""
        self.number += 1
        seen = await self.sandbox.run(Action(self.number, command, timeout_s))
        assert seen.exit_status == status, seen.output.decode(errors="replace")
        return seen.output.decode(errors="surrogateescape")

    async def checkpoint(self) -> str:
        """full_checkpoint after the last action; its name."""
        name = self.bench.name()
        await self.bench.host.checkpoint(self.incarnation, name, self.number)
        return name

    async def kill_and_restore(self, checkpoint: str, number: int | None = None) -> Live:
        """Remove the container and bring the checkpoint back."""
        await self.sandbox.close()
        await self.bench.host.remove(self.incarnation.name)
        return await self.bench.restore(checkpoint, self.number if number is None else number)
