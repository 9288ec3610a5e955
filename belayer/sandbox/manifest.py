"""What a published checkpoint says of itself. Written last: a folder without one is not a checkpoint."""

from __future__ import annotations

from pathlib import Path

import msgspec

from belayer.errors import RestoreFailedError
from belayer.sandbox import layer

FORMAT = 1
FILE_NAME = "manifest.json"


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
    images: dict[str, tuple[int, str]]
    """CRIU's files: name -> (bytes, digest)."""
    layer_entries: int
    layer_bytes: int
    layer_digest: str
    format: int = FORMAT

    @property
    def size_bytes(self) -> int:
        return self.layer_bytes + sum(size for size, _ in self.images.values())


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
    except msgspec.MsgspecError as error:
        raise RestoreFailedError(folder.name, f"its manifest cannot be read: {error}") from None
    if manifest.format != FORMAT:
        raise RestoreFailedError(folder.name, f"it has format {manifest.format}, this version reads {FORMAT}")
    return manifest


def verify(folder: Path, manifest: Manifest) -> None:
    """RestoreFailedError unless all is there; after a reboot, byte for byte."""
    thorough = manifest.boot_id != boot_id()
    for name, (size, digest) in manifest.images.items():
        path = folder / "images" / name
        if not path.is_file() or path.stat().st_size != size:
            raise RestoreFailedError(folder.name, f"images/{name} is missing or cut off")
        if thorough and layer.file_digest(path) != digest:
            raise RestoreFailedError(folder.name, f"images/{name} is damaged")
    if thorough and layer.summarize(folder / "layer").digest != manifest.layer_digest:
        raise RestoreFailedError(folder.name, "its layer is damaged")
