"""Where segments lie: a folder on this machine, or anything that fsspec reaches (s3://, gs://, az://, ...).

`put` returns only once the segment is durable under its name: on a disk after fsync of the file and of its folder, in
an object store after it was read back and its digest compared. A put that dies leaves either nothing under the name, or
in an object store something that nobody was told of. Names are used once; nothing is ever overwritten.

All methods block: call them in a thread. Every failure of the storage is an ArchiveError without credentials in it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import parse_qsl, urlsplit

from belayer.errors import ArchiveError, InputError
from belayer.journal.codec import digest_of

SUFFIX = ".segment"
_PARTIAL = ".partial"
_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "obs"}
"""Stores without folders, where making one would make a bucket of a mistyped name."""
T = TypeVar("T")


class Stored(NamedTuple):
    """One segment as the storage lists it."""

    name: str
    size_bytes: int


class Storage(Protocol):
    """A place for segments."""

    @property
    def shown(self) -> str:
        """For messages: the place without credentials."""
        ...

    def put(self, name: str, content: bytes) -> None:
        """Store it durably. ArchiveError: it is not there, or nobody knows; use another name for the next try."""
        ...

    def read(self, name: str, start: int, end: int | None) -> bytes:
        """Bytes from `start` up to `end`; a negative start counts from the end, as in a slice."""
        ...

    def segments(self) -> list[Stored]:
        """All segments, oldest name first."""
        ...

    def remove(self, name: str) -> None:
        """Remove it; one that is gone already is no error."""
        ...


def open_storage(url: str, namespace: str) -> Storage:
    """The storage of a namespace under an archive URL: a path, file:///path, or an fsspec URL."""
    scheme = urlsplit(url).scheme
    if scheme in ("", "file", "local"):
        path = url.partition("://")[2] if scheme else url
        if not path:
            raise InputError(f"{url!r} is no archive; expected a folder, or a URL as s3://bucket/folder")
        return LocalStorage(Path(path) / namespace)
    try:
        fsspec: Any = importlib.import_module("fsspec")
    except ModuleNotFoundError:
        raise InputError("an archive that is no folder needs fsspec; pip install 'belayer[archive]'") from None
    try:
        files, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InputError(f"the archive {shown_url(url)} cannot be opened: {error}") from None
    shown = f"{shown_url(url).rstrip('/')}/{namespace}"
    return ObjectStorage(files, f"{path.rstrip('/')}/{namespace}", shown, _secrets_of(url))


def shown_url(url: str) -> str:
    """The URL without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _protocols(files: Any) -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)


def _secrets_of(url: str) -> tuple[str, ...]:
    """What of the URL must not be said: its login and the values of its options."""
    parts = urlsplit(url)
    login = parts.netloc.rpartition("@")[0]
    found = (*login.split(":"), login, parts.query, *(value for _, value in parse_qsl(parts.query)))
    return tuple(sorted({text for text in found if text}, key=len, reverse=True))


class LocalStorage:
    """A folder on this machine (or on a network file system that honours fsync)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def shown(self) -> str:
        return str(self._folder)

    def put(self, name: str, content: bytes) -> None:
        partial = self._folder / (name + _PARTIAL)
        try:
            if not self._folder.is_dir():
                self._make_folder()
            with partial.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(self._folder / name)
            sync_folder(self._folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise ArchiveError(self.shown, f"cannot write {name}: {error.strerror or error}") from None

    def _make_folder(self) -> None:
        above = self._folder
        while not above.is_dir():
            above = above.parent
        self._folder.mkdir(parents=True, exist_ok=True)
        for folder in (*self._folder.parents,):
            sync_folder(folder)
            if folder == above:
                break

    def read(self, name: str, start: int, end: int | None) -> bytes:
        try:
            with (self._folder / name).open("rb") as file:
                if start < 0:
                    size = file.seek(0, os.SEEK_END)
                    file.seek(max(0, size + start))
                else:
                    file.seek(start)
                return file.read() if end is None else file.read(end - start)
        except OSError as error:
            raise ArchiveError(self.shown, f"cannot read {name}: {error.strerror or error}") from None

    def segments(self) -> list[Stored]:
        try:
            found = [Stored(path.name, path.stat().st_size) for path in self._folder.glob(f"*{SUFFIX}")]
        except OSError as error:
            raise ArchiveError(self.shown, f"cannot be listed: {error.strerror or error}") from None
        return sorted(found)

    def remove(self, name: str) -> None:
        try:
            (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise ArchiveError(self.shown, f"cannot remove {name}: {error.strerror or error}") from None


class ObjectStorage:
    """Whatever fsspec reaches. What it raises for trouble with the store is OSError, by its own convention."""

    def __init__(self, files: Any, folder: str, shown: str, secrets: Sequence[str] = ()) -> None:
        """`secrets`: what must not appear in any message, the longest first."""
        self._files = files
        self._folder = folder
        self._secrets = secrets
        self._has_buckets = not _BUCKETS.isdisjoint(_protocols(files))
        self.shown = shown

    def put(self, name: str, content: bytes) -> None:
        path = f"{self._folder}/{name}"

        def write() -> bytes:
            if not self._has_buckets:
                self._files.makedirs(self._folder, exist_ok=True)
            self._files.pipe_file(path, content)
            self._files.invalidate_cache()
            return self._files.cat_file(path)

        if digest_of(self._tried(f"write {name}", write)) != digest_of(content):
            raise ArchiveError(self.shown, f"{name} reads back otherwise than it was written; it is not used")

    def read(self, name: str, start: int, end: int | None) -> bytes:
        path = f"{self._folder}/{name}"

        def read() -> bytes:
            size = int(self._files.size(path)) if start < 0 else 0
            return bytes(self._files.cat_file(path, start=max(0, size + start) if start < 0 else start, end=end))

        return self._tried(f"read {name}", read)

    def segments(self) -> list[Stored]:
        def listed() -> list[Stored]:
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._folder, detail=True)
            except FileNotFoundError:
                return []
            named = ((str(item["name"]).rsplit("/", 1)[-1], item) for item in found)
            return sorted(Stored(name, int(item["size"])) for name, item in named if name.endswith(SUFFIX))

        return self._tried("be listed", listed)

    def remove(self, name: str) -> None:
        def remove() -> None:
            try:
                self._files.rm_file(f"{self._folder}/{name}")
            except FileNotFoundError:
                return

        self._tried(f"remove {name}", remove)

    def _tried(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except OSError as error:
            said = error.strerror or str(error)
            for secret in self._secrets:
                said = said.replace(secret, "***")
            raise ArchiveError(self.shown, f"cannot {what}: {said}") from None


def sync_folder(folder: Path) -> None:
    """What was renamed within the folder is on the disk."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
