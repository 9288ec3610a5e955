"""What a published checkpoint says of itself. Written last: a folder without one is not a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from belayer.errors import RestoreFailedError
from belayer.journal.events import LeftOut
from belayer.sandbox.captured import Captured, digest_of, file_digest
from belayer.sandbox.given import Edited
from belayer.sandbox.limits import Step, unbounded
from belayer.sandbox.machine import Machine
from belayer.sandbox.probe import Probe

FORMAT = 1
FILE_NAME = "manifest.json"
LAYER = "layer"
"""The folder of the files."""
IMAGES = "images"
"""The folder of CRIU's images; empty when the container was quiet."""
RUNNER_STATE = "runner.json"
"""What a fresh runner must know to go on, when the container was quiet."""
PROBE = "probe.json"
"""What the processes were like, when there were any but the idle runner."""
EDITED = "edited.json"
"""The files of Docker's own that the container had changed, if it had."""
LAYER_INDEX = "layer.index"
"""What a capture after a restore may reuse."""
CHECKED_BYTES = 16 << 20
"""Up to this size every byte is read before each restore: about 1 ms a megabyte."""


class Manifest(msgspec.Struct, frozen=True):
    """Names, sizes and digests (BLAKE2b-256, hex) of one checkpoint."""

    checkpoint: str
    run: str
    trajectory: str
    incarnation: str
    action: int
    """The number of the last action that had run."""
    image_digest: str
    boot_id: str
    """Of the machine when it was made: after another boot the digests are checked before a restore."""
    created_at_s: float
    frozen_s: float
    noise: str
    """Why the processes were dumped; empty: there was nothing but the idle runner, and no image was needed."""
    traits: str
    """Of process 1 when it was fresh; see `quiet.py`."""
    mounts: dict[str, str]
    """What a restore must provide besides what runc does; see `mounts.py`."""
    images: dict[str, tuple[int, str]]
    """CRIU's files: name -> (bytes, digest)."""
    layer_entries: int
    layer_bytes: int
    layer_digest: str
    format: int = FORMAT
    not_captured: tuple[str, ...] = ()
    """Folders of the host and volumes that were mounted: their contents are not in it."""
    left_out: tuple[LeftOut, ...] = ()
    """Not empty: processes stood there, and it holds the files alone."""
    machine: Machine | None = None
    """What restores it must be like this one, if there are processes in it."""
    notes: dict[str, tuple[int, str]] = {}
    """RUNNER_STATE, PROBE, EDITED and LAYER_INDEX, as far as there are: name -> (bytes, digest)."""

    @property
    def quiet(self) -> bool:
        """Whether a fresh runner over the files is all that it holds."""
        return not self.noise

    @property
    def size_bytes(self) -> int:
        return self.layer_bytes + sum(size for size, _ in self.images.values())


def read_index(folder: Path) -> Captured | None:
    """The layer's index; None when it is not there or not readable: then the next capture copies everything."""
    try:
        return Captured.decode((folder / LAYER_INDEX).read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None


def read_probe(folder: Path) -> Probe:
    """What its processes were like. RestoreFailedError when it is not there or not readable."""
    try:
        return Probe.decode((folder / PROBE).read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise RestoreFailedError(folder.name, f"{PROBE} cannot be read: {error}") from None


def read_edited(folder: Path, manifest: Manifest) -> Edited | None:
    """The files of Docker's own that it holds; None when it holds none. RestoreFailedError when they are unreadable."""
    if EDITED not in manifest.notes:
        return None
    try:
        return Edited.decode((folder / EDITED).read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise RestoreFailedError(folder.name, f"{EDITED} cannot be read: {error}") from None


def sizes_and_digests(files: Iterable[Path], step: Step = unbounded) -> dict[str, tuple[int, str]]:
    """What the manifest says of the files that are there."""
    return {path.name: (path.stat().st_size, file_digest(path, step)) for path in files if path.exists()}


def boot_id() -> str:
    """Random since the machine's boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it into the checkpoint's folder."""
    (folder / FILE_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def read_manifest(folder: Path) -> Manifest:
    """RestoreFailedError when the checkpoint is not there or cannot be read."""
    try:
        manifest = msgspec.json.decode((folder / FILE_NAME).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise RestoreFailedError(folder.name, "there is no such checkpoint here") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise RestoreFailedError(folder.name, f"its manifest cannot be read: {error}") from None
    if manifest.format != FORMAT:
        raise RestoreFailedError(folder.name, f"it has format {manifest.format}, this version reads {FORMAT}")
    return manifest


def verify(folder: Path, manifest: Manifest, thorough: bool = False) -> None:
    """RestoreFailedError unless all is there; byte for byte, unless it is large and was made since the boot."""
    thorough = thorough or manifest.size_bytes <= CHECKED_BYTES or manifest.boot_id != boot_id()
    files = manifest.notes | {f"{IMAGES}/{name}": image for name, image in manifest.images.items()}
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise RestoreFailedError(folder.name, f"{name} is missing or cut off")
        if thorough and file_digest(path) != digest:
            raise RestoreFailedError(folder.name, f"{name} is damaged")
    if thorough and _layer_digest(folder) != manifest.layer_digest:
        raise RestoreFailedError(folder.name, "its layer is damaged")


def _layer_digest(folder: Path) -> str:
    try:
        return digest_of(folder / LAYER)
    except OSError as error:
        raise RestoreFailedError(folder.name, f"its layer cannot be read: {error}") from None
