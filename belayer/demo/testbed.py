"""The image that a trajectory runs in: the base image with /testbed being a package's sdist as a git repository.

Invariant: the same package, version and base give the same files, down to the commit's id and the git index: dates,
author and order are fixed. An image is named only when it is complete, and one that fits is not built again. Sdists are
kept in $BELAYER_HOME/sdists; one that a person puts there is used as it is.
What fails is a NoTestbedError or HostUnfitError that says what to do; no container or folder of the build is left.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from belayer.errors import BelayerError, HostUnfitError, InputError
from belayer.sandbox.home import default_home

BASE_IMAGE = "belayer-base:bookworm"
RECIPE = 1
"""Raised when what this module puts into an image changes."""
FETCH_S = 180.0
STEP_S = 120.0
LOCK_S = 600.0
_POLL_S = 0.1
_LABEL = "belayer.testbed"
_BUILDER = "belayer-testbed-build-"
"""The name of a container that becomes an image, before the building process's id."""
_PIP_SDIST = Path(__file__).with_name("pip_sdist.py")
_DATE = "2000-01-01T00:00:00+0000"
_GIT = {
    "GIT_AUTHOR_NAME": "testbed",
    "GIT_AUTHOR_EMAIL": "testbed@localhost",
    "GIT_AUTHOR_DATE": _DATE,
    "GIT_COMMITTER_NAME": "testbed",
    "GIT_COMMITTER_EMAIL": "testbed@localhost",
    "GIT_COMMITTER_DATE": _DATE,
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
}


class NoTestbedError(BelayerError):
    """A package's /testbed could not be made."""

    def __init__(self, package: str, version: str, cause: str, remedy: str) -> None:
        super().__init__(f"no testbed of {package} {version}: {cause}; {remedy}")
        self.package = package
        self.version = version
        self.cause = cause
        self.remedy = remedy


def image_name(package: str, version: str) -> str:
    """The testbed's image. InputError when the names are not a package's and a version's."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", package):
        raise InputError(f"{package!r} is not a package's name; expected one as PyPI has it, like marshmallow")
    if not re.fullmatch(r"[0-9][A-Za-z0-9.!+_-]*", version):
        raise InputError(f"{version!r} is not a version; expected one as PyPI has it, like 3.0.0")
    normal = re.sub(r"[-_.]+", "-", package).lower()
    return f"belayer-testbed-{normal}:{re.sub(r'[!+]', '_', version)}"


def build_testbed(package: str, version: str, *, say: Callable[[str], None] = lambda step: None) -> str:
    """The name of the testbed's image, built unless Docker has it. `say` is told each step that takes long.

    It blocks: up to a few seconds, more for the download. At most one builds on a machine at a time.
    """
    image = image_name(package, version)
    base = _docker("image", "inspect", "--format", "{{.Id}}", BASE_IMAGE, missing="the base image")
    recipe = hashlib.sha256(f"{RECIPE} {base} {package} {version}".encode()).hexdigest()[:16]
    if _label(image) == recipe:
        return image
    sdists = default_home() / "sdists"
    try:
        sdists.mkdir(parents=True, exist_ok=True)
        with _locked(sdists, package, version):
            if _label(image) != recipe:
                sdist = _sdist(sdists, package, version, say)
                with tempfile.TemporaryDirectory(prefix=".testbed-", dir=sdists) as folder:
                    say(f"unpacking {sdist.name}")
                    _make_repository(Path(folder) / "testbed", sdist, package, version)
                    say(f"building {image}")
                    _make_image(Path(folder), image, recipe)
    except OSError as error:
        raise NoTestbedError(package, version, str(error), "is the disk full, or BELAYER_HOME not yours?") from error
    return image


def _sdist(sdists: Path, package: str, version: str, say: Callable[[str], None]) -> Path:
    path = sdists / f"{package}-{version}.tar.gz"
    if path.exists():
        return path
    say(f"fetching {package} {version}")
    done = _run(sys.executable, str(_PIP_SDIST), package, version, str(path), timeout_s=FETCH_S)
    if done.returncode != 0:
        by_hand = f"put the sdist at {path} by hand or mend what pip says"
        raise NoTestbedError(package, version, _last_line(done), by_hand)
    return path


def _make_repository(testbed: Path, sdist: Path, package: str, version: str) -> None:
    """Unpack the sdist into `testbed` and commit all of it, the same bytes each time."""
    testbed.mkdir()
    unpack = ("tar", "-xf", str(sdist), "-C", str(testbed), "--strip-components=1")
    done = _run(*unpack, "--no-same-owner", "--no-same-permissions")
    if done.returncode != 0:
        raise NoTestbedError(package, version, _last_line(done), f"remove {sdist} and try again")
    steps = (
        ("init", "--quiet", "--initial-branch=main", "--template="),
        ("config", "core.logAllRefUpdates", "false"),
        ("config", "user.name", "testbed"),
        ("config", "user.email", "testbed@localhost"),
        ("add", "--all", "--force"),
        ("commit", "--quiet", "--no-gpg-sign", "--allow-empty", f"--message={package} {version}, the sdist from PyPI"),
        # One pack instead of thousands of small files; more than one thread would make its bytes vary.
        ("-c", "pack.threads=1", "repack", "-a", "-d", "--quiet"),
    )
    for step in (*steps, ("read-tree", "HEAD")):
        if step[0] == "add":
            # Sdists seldom carry the .gitignore that a checkout has; an agent's `git add` should not take these along.
            (testbed / ".git" / "info").mkdir(exist_ok=True)
            (testbed / ".git" / "info" / "exclude").write_text("__pycache__/\n*.pyc\n.pytest_cache/\n")
        if step[0] == "read-tree":
            # `add` notes inodes and times in the index; an index made from the commit alone has none.
            (testbed / ".git" / "index").unlink()
        done = _run("git", "-C", str(testbed), *step, env={**os.environ, **_GIT})
        if done.returncode != 0:
            raise NoTestbedError(
                package, version, f"git {step[0]}: {_last_line(done)}", "is git on PATH and the disk not full?"
            )
    (testbed / ".git" / "COMMIT_EDITMSG").unlink(missing_ok=True)


def _make_image(folder: Path, image: str, recipe: str) -> None:
    """Base image + folder/testbed. By create, copy and commit: every Docker has them, with or without a builder."""
    _remove_left_over()
    builder = f"{_BUILDER}{os.getpid()}"
    _docker("create", "--name", builder, BASE_IMAGE)
    try:
        pack = (
            "tar",
            "-C",
            str(folder),
            "--sort=name",
            f"--mtime={_DATE}",
            "--owner=0",
            "--group=0",
            "--numeric-owner",
        )
        with tempfile.TemporaryFile(dir=folder) as archive:
            done = _run(*pack, "-cf", "-", "testbed", stdout=archive)
            if done.returncode != 0:
                raise OSError(_last_line(done))
            archive.seek(0)
            _docker("cp", "-", f"{builder}:/", stdin=archive)
        changes = (f"LABEL {_LABEL}={recipe}", "ENV PYTHONPATH=/testbed/src:/testbed")
        _docker("commit", *(f"--change={change}" for change in changes), builder, image)
    finally:
        _docker("rm", "--force", builder)


def _remove_left_over() -> None:
    """The containers of builds whose process is gone."""
    for name in _docker("ps", "--all", "--filter", f"name={_BUILDER}", "--format", "{{.Names}}").split():
        if not Path("/proc", name.removeprefix(_BUILDER)).exists():
            _docker("rm", "--force", name)


@contextmanager
def _locked(folder: Path, package: str, version: str) -> Iterator[None]:
    """The folder's lock, which ends with the process that holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + LOCK_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    waited = f"another process has been building testbeds for {LOCK_S:.0f} s"
                    raise NoTestbedError(package, version, waited, "wait for it or end it") from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _label(image: str) -> str:
    """The recipe that an image was built by; empty when there is no such image."""
    done = _run("docker", "image", "inspect", "--format", f'{{{{index .Config.Labels "{_LABEL}"}}}}', image)
    return done.stdout.decode().strip() if done.returncode == 0 else ""


def _docker(*arguments: str, stdin: IO[bytes] | None = None, missing: str = "") -> str:
    """What `docker` prints. HostUnfitError when it refuses."""
    done = _run("docker", *arguments, stdin=stdin)
    if done.returncode != 0:
        what = missing or f"docker {arguments[0]}"
        raise HostUnfitError(what, _last_line(done), "`make setup` as root; `belayer doctor` tells what is wrong")
    return done.stdout.decode().strip()


def _run(
    *command: str,
    stdin: IO[bytes] | None = None,
    stdout: IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = STEP_S,
) -> subprocess.CompletedProcess[bytes]:
    """The program's end, whatever it was. HostUnfitError when it is not installed or does not end in time."""
    if shutil.which(command[0]) is None:
        raise HostUnfitError(command[0], "not on PATH", "`make setup` as root installs it")
    try:
        return subprocess.run(
            command,
            stdin=stdin or subprocess.DEVNULL,
            stdout=stdout or subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            umask=0o022,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise HostUnfitError(
            command[0], f"did not end within {timeout_s:.0f} s", "`belayer doctor` may tell why"
        ) from None


def _last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"{done.args[0]} ended with status {done.returncode}"
