"""What a capture knows and finds besides the layer, and how that is written beside it: the manifest last of all."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from belayer.journal.events import LeftOut
from belayer.sandbox import lazy
from belayer.sandbox.captured import Captured
from belayer.sandbox.containers import Container
from belayer.sandbox.criu import Criu
from belayer.sandbox.eager import keep_eager
from belayer.sandbox.given import Edited, Files
from belayer.sandbox.limits import Bounds
from belayer.sandbox.machine import this_machine
from belayer.sandbox.manifest import (
    EDITED,
    IMAGES,
    LAYER_INDEX,
    PROBE,
    RUNNER_STATE,
    Manifest,
    boot_id,
    sizes_and_digests,
    write_manifest,
)
from belayer.sandbox.owner import Owner
from belayer.sandbox.probe import Probe
from belayer.sandbox.protocol import Incarnation


@dataclass(frozen=True, slots=True)
class Subject:
    """A container at a boundary."""

    incarnation: Incarnation
    container: Container
    owner: Owner | None
    action: int
    runner: bytes
    """What its idle runner knows after that action."""

    @property
    def traits(self) -> str:
        """Of its process 1 when it was fresh; empty when nobody has noted them."""
        return "" if self.owner is None else self.owner.traits

    @property
    def given(self) -> Files:
        """What Docker wrote into the files that it binds."""
        return {} if self.owner is None else self.owner.given


@dataclass(slots=True)
class Findings:
    """What was found while it stood."""

    noise: str = ""
    """What there is besides files and an idle runner; empty: nothing, and no process is in the checkpoint."""
    edited: Edited = field(default_factory=lambda: Edited({}, b""))
    mounts: dict[str, str] = field(default_factory=dict)
    probe: Probe = field(default_factory=lambda: Probe({}))
    left_out: tuple[LeftOut, ...] = ()
    frozen_s: float = 0.0


def seal(
    folder: Path, name: str, subject: Subject, found: Findings, captured: Captured, criu: Criu, bounds: Bounds
) -> Manifest:
    """Write what the checkpoint `name`, whose layer and images are in the folder, says of itself."""
    if found.noise:
        (folder / PROBE).write_bytes(found.probe.encode())
        if lazy.is_worth_it(path.stat().st_size for path in (folder / IMAGES).glob("pages-*")):
            keep_eager(folder / IMAGES, criu.image_messages())
    else:
        (folder / RUNNER_STATE).write_bytes(subject.runner)
    if found.edited.files:
        (folder / EDITED).write_bytes(found.edited.encode())
    (folder / LAYER_INDEX).write_bytes(captured.encode())
    manifest = Manifest(
        checkpoint=name,
        run="" if subject.owner is None else subject.owner.run,
        trajectory="" if subject.owner is None else subject.owner.trajectory,
        incarnation=subject.incarnation.name,
        action=subject.action,
        image_digest=subject.container.image_digest,
        boot_id=boot_id(),
        created_at_s=time.time(),
        frozen_s=found.frozen_s,
        noise=found.noise,
        traits=subject.traits,
        mounts=found.mounts,
        images=sizes_and_digests(sorted((folder / IMAGES).iterdir()), bounds.go_on),
        notes=sizes_and_digests(folder / note for note in (RUNNER_STATE, PROBE, EDITED, LAYER_INDEX)),
        layer_entries=len(captured.entries),
        layer_bytes=captured.size_bytes,
        layer_digest=captured.digest,
        machine=this_machine(criu.version),
        not_captured=subject.container.volumes,
        left_out=found.left_out,
    )
    write_manifest(folder, manifest)
    return manifest
