"""full_restore's files: fills a created container from a checkpoint, so that Docker can start it there.

Docker packs and copies a checkpoint's images on their way to CRIU; relative links in their place, with enough `../` to
reach / from wherever the copy is unpacked, are copied instead, in no time.
"""

from __future__ import annotations

from pathlib import Path

from belayer.sandbox.captured import Captured, rebase
from belayer.sandbox.layer import fill
from belayer.sandbox.manifest import IMAGES, LAYER, Manifest, read_index

CLIMB = "../" * 40
"""More levels than any folder that Docker or containerd unpacks to; / is its own parent."""


def fill_layer(checkpoint: Path, upper: Path) -> Captured | None:
    """Copy the saved layer into the new container's, which is not mounted yet; what its first capture may reuse."""
    fill(checkpoint / LAYER, upper)
    index = read_index(checkpoint)
    return None if index is None else rebase(upper, index)


def link_images(checkpoint: Path, manifest: Manifest, folder: Path) -> None:
    """Lay the images out where Docker looks for them, as links."""
    folder.mkdir(mode=0o700, parents=True)
    images = (checkpoint / IMAGES).resolve()
    for name in manifest.images:
        (folder / name).symlink_to(CLIMB + str(images / name).lstrip("/"))
