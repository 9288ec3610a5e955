"""full_restore's files: fills a created container from a checkpoint, so that Docker can start it there.

Docker packs and copies a checkpoint's images on their way to CRIU; relative links in their place, with enough `../` to
reach / from wherever the copy is unpacked, are copied instead, in no time.
"""

from __future__ import annotations

from pathlib import Path

from belayer.sandbox import layer
from belayer.sandbox.manifest import Manifest

CLIMB = "../" * 40
"""More levels than any folder that Docker or containerd unpacks to; / is its own parent."""


def fill_layer(checkpoint: Path, upper: Path, timeout_s: float) -> None:
    """Copy the saved layer into the new container's, which is not mounted yet."""
    layer.copy(checkpoint / "layer", upper, timeout_s)


def link_images(checkpoint: Path, manifest: Manifest, folder: Path) -> None:
    """Lay the images out where Docker looks for them, as links."""
    folder.mkdir(mode=0o700, parents=True)
    images = (checkpoint / "images").resolve()
    for name in manifest.images:
        (folder / name).symlink_to(CLIMB + str(images / name).lstrip("/"))
