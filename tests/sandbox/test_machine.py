"""A checkpoint of another machine: restored where it can go on, refused with both values where it cannot."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from belayer.errors import CheckpointUnfitError
from belayer.sandbox.machine import Machine, unfit
from belayer.sandbox.manifest import read_manifest, write_manifest
from tests.sandbox.conftest import Bench

pytestmark = pytest.mark.sandbox

HERE = Machine("x86_64", "6.12.3-amd64", (4, 2), 1, ("avx", "sse4_2"))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"architecture": "aarch64"}, "the architecture"),
        ({"kernel": "6.13.0"}, "the kernel"),
        ({"criu": (4, 3)}, "CRIU"),
        ({"cgroups": 2}, "the version of cgroups"),
        ({"processor": ("avx", "avx512f", "sse4_2")}, "the processor"),
    ],
)
def test_what_a_machine_must_have(change: dict[str, Any], what: str) -> None:
    difference = unfit(msgspec.structs.replace(HERE, **change), HERE)
    assert difference is not None
    assert difference[0].startswith(what)
    assert difference[1] != difference[2]


@pytest.mark.parametrize("change", [{}, {"kernel": "6.9-rc1+"}, {"criu": (4, 1)}, {"processor": ("avx",)}])
def test_older_or_less_will_do(change: dict[str, Any]) -> None:
    assert unfit(msgspec.structs.replace(HERE, **change), HERE) is None


async def test_checked_before_anything_is_made(bench: Bench) -> None:
    live = await bench.create()
    await live.sh("sleep 1000 & echo here > file")
    checkpoint = await live.checkpoint()
    folder = bench.host.checkpoint_path(checkpoint)
    manifest = msgspec.structs.replace(read_manifest(folder), boot_id="elsewhere")
    assert manifest.machine is not None
    write_manifest(folder, manifest)
    back = await bench.restore(checkpoint, 1)
    assert await back.sh("cat file; pgrep -c sleep") == "here\n1\n"

    before = await bench.host.incarnations(bench.run)
    newer = msgspec.structs.replace(manifest.machine, kernel="99.0.1")
    write_manifest(folder, msgspec.structs.replace(manifest, machine=newer))
    with pytest.raises(CheckpointUnfitError, match=r"99\.0\.1 where it was made and .* here") as refusal:
        await bench.restore(checkpoint, 1)
    assert (refusal.value.there, refusal.value.here) == ("99.0.1", manifest.machine.kernel)

    write_manifest(folder, msgspec.structs.replace(manifest, image_digest="sha256:" + "0" * 64))
    with pytest.raises(CheckpointUnfitError, match="the image is sha256:0000"):
        await bench.restore(checkpoint, 1)
    assert await bench.host.incarnations(bench.run) == before
