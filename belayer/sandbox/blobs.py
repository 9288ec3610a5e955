"""What checkpoints have in common is on the disk once: a folder of files named by what they are, the blobs. Checkpoints
hold hard links to them, so a file's link count is its count of references, and no other count can be wrong.

A blob's name is the digest of its contents, with its owner, mode, times and xattrs for a file of a layer, because those
belong to the inode. In one layer no two files get the same inode unless they were one file in the container: a restore
would make them one.

Whoever dies at any point leaves nothing that is wrong. A checkpoint is whole without this folder. A blob is added after
its checkpoint is durable, so a crash of the machine leaves none that is cut off. A blob that no checkpoint holds has
one link and is removed (`drop`, `sweep`); one that is taken at that very moment stays, under the name that took it.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from belayer.sandbox.captured import Captured, opened
from belayer.sandbox.manifest import IMAGES, LAYER, Manifest, read_index
from belayer.sandbox.scan import Scan, scan

SMALLEST_BYTES = 16 << 10
"""Smaller files are not worth a name: they are shared only with the checkpoint before, by `layer.py`."""
TAKEN = ".taken"
"""A blob's name in a checkpoint's folder until it has the file's."""

Keys = dict[bytes, str]
"""A file below a checkpoint's folder -> its blob's name."""


def keys_of(entries: Scan, captured: Captured, images: Mapping[str, tuple[int, str]]) -> Keys:
    """The blobs' names of all that can be shared; `images` as in the manifest."""
    keys = {image_path(name): digest for name, (size, digest) in images.items() if size >= SMALLEST_BYTES}
    for path, found in entries.items():
        if stat.S_ISREG(found.st_mode) and found.st_size >= SMALLEST_BYTES and path in captured.entries:
            keys[layer_path(path)] = _layer_key(captured.entries[path].digest, found)
    return keys


def image_path(name: str) -> bytes:
    """Where an image lies in its checkpoint's folder."""
    return os.fsencode(f"{IMAGES}/{name}")


def layer_path(path: bytes) -> bytes:
    """Where an entry of the layer lies in its checkpoint's folder."""
    return os.fsencode(LAYER) + b"/" + path


class Blobs:
    """The blobs of one Belayer folder; it lies on the same disk as the checkpoints, or nothing is shared."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def share(self, checkpoint: Path, keys: Keys, fresh: Scan) -> tuple[Keys, int]:
        """Put blobs in the place of those files of a checkpoint, not yet published, that are `fresh` copies.

        Returns those for which there is no blob, to be added once the checkpoint is durable, and how many bytes were
        saved.
        """
        used = {key for path, key in keys.items() if path not in fresh}
        new: Keys = {}
        saved_bytes = 0
        with opened(checkpoint) as root:
            for path, found in fresh.items():
                key = keys.get(path)
                if key is None or key in used or found.st_nlink > 1:
                    continue
                used.add(key)
                if self._take(root, path, key, found.st_size):
                    saved_bytes += found.st_blocks * 512
                else:
                    new[path] = key
        return new, saved_bytes

    def add(self, checkpoint: Path, new: Keys) -> None:
        """Let later checkpoints share these files of a durable one. What cannot be shared is left alone."""
        with suppress(FileNotFoundError), opened(checkpoint) as root:
            for path, key in new.items():
                with suppress(OSError):
                    os.link(path, self._folder / key, src_dir_fd=root, follow_symlinks=False)

    def held_by(self, checkpoint: Path, manifest: Manifest | None) -> set[str]:
        """Blobs that only this checkpoint may hold, to be dropped once its folder is gone."""
        index = read_index(checkpoint)
        if manifest is None or index is None:
            return set()  # the sweep finds them
        with suppress(OSError), opened(checkpoint / LAYER) as root:
            entries = {path: found for path, found in scan(root).items() if found.st_nlink > 1}
            return set(keys_of(entries, index, manifest.images).values())
        return set()  # gone, or not to be read: the same

    def drop(self, keys: Collection[str]) -> None:
        """Remove those of the blobs that nobody holds."""
        for key in keys:
            with suppress(FileNotFoundError):
                blob = self._folder / key
                if blob.stat().st_nlink == 1:
                    blob.unlink()

    def sweep(self) -> int:
        """Remove all blobs that nobody holds; how many bytes that freed."""
        freed = 0
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if found.st_nlink == 1:
                        Path(entry.path).unlink()
                        freed += found.st_blocks * 512
        return freed

    def _take(self, root: int, path: bytes, key: str, size_bytes: int) -> bool:
        """Put the blob in the file's place. False: there is none, or it cannot be had."""
        with suppress(OSError):
            os.link(self._folder / key, TAKEN, dst_dir_fd=root, follow_symlinks=False)
            try:
                if os.stat(TAKEN, dir_fd=root).st_size == size_bytes:  # or somebody has been at it
                    parent = os.path.dirname(path)  # noqa: PTH120
                    times = os.stat(parent, dir_fd=root)
                    os.rename(TAKEN, path, src_dir_fd=root, dst_dir_fd=root)
                    os.utime(parent, ns=(times.st_atime_ns, times.st_mtime_ns), dir_fd=root)
                    return True
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(TAKEN, dir_fd=root)
        return False


def _layer_key(digest: str, found: os.stat_result) -> str:
    """`digest` covers contents and xattrs. Its 128 bits are enough: to make two files with one digest somebody has to
    write both."""
    meant = f"{digest} {found.st_mode} {found.st_uid} {found.st_gid} {found.st_size} {found.st_mtime_ns}"
    return hashlib.blake2b(meant.encode(), digest_size=16).hexdigest()
