"""Our OCI runtime as Docker finds it: a launcher that never changes, and beside it each version that is in use here.

Docker knows the runtime by one path of a machine, while checkouts of several versions may share the machine. So a
version is named after the digest of its script, a restore says which one it wants, and whatever is missing (or was
replaced by a Belayer from before there were versions) is put back before each restore.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from belayer import ids

OLD_S = 86_400.0
"""A version that nobody has put back for so long is not in use."""
SCRIPTS = Path(__file__).parent


class Runtime:
    """The runtime at the path by which Docker knows it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._requests = path.parents[1] / "restore"
        self._script = (SCRIPTS / "runtime.sh").read_bytes()
        self._version = path.with_name(f"{path.name}-{hashlib.sha256(self._script).hexdigest()[:8]}")

    def install(self) -> None:
        """Put the launcher and this version where Docker looks for them, unless they are there."""
        _put(self._path, (SCRIPTS / "launcher.sh").read_bytes())
        _put(self._version, self._script)
        os.utime(self._version)

    def remove_old(self) -> None:
        """Remove versions and requests that nobody uses any more."""
        before = time.time() - OLD_S
        for folder, pattern in ((self._path.parent, f"{self._path.name}-*"), (self._requests, "*")):
            for path in folder.glob(pattern):
                with suppress(FileNotFoundError):
                    if path != self._version and path.stat().st_mtime < before:
                        path.unlink()

    @contextmanager
    def restoring(self, container_id: str, images: Path, work: Path, options: Sequence[str]) -> Iterator[None]:
        """Starting the container in here restores it from its images, with CRIU's settings and logs in `work`."""
        self.install()
        self._requests.mkdir(mode=0o700, exist_ok=True)
        request = self._requests / container_id
        request.write_text(f"{self._version.name}\n{images}\n{work}\n{' '.join(options)}\n")
        try:
            yield
        finally:
            request.unlink(missing_ok=True)


def _put(path: Path, script: bytes) -> None:
    """By rename: a container may be using it."""
    with suppress(FileNotFoundError):
        if path.read_bytes() == script and os.access(path, os.X_OK):
            return
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}-{ids.new_suffix()}")
    new.write_bytes(script)
    new.chmod(0o755)
    new.rename(path)
