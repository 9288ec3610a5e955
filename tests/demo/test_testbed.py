from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from belayer.demo import testbed
from belayer.demo.testbed import NoTestbedError, build_testbed, image_name
from belayer.errors import InputError
from tests.waiting import DEADLINE_S

PACKAGE = "belayer-sample"
VERSION = f"1.{int.from_bytes(os.urandom(3))}"
"""Of this process alone: images are the machine's."""
FILES = {
    # Building this package would be noticed.
    "setup.py": "raise SystemExit('setup.py was run')\n",
    "src/belayer_sample.py": "answer = 42\n",
    "ignored.pyc": "kept all the same\n",
    ".gitignore": "*.pyc\n",
}


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only place where pip looks, holding one sdist; and a BELAYER_HOME of the test's own."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    with tarfile.open(folder / f"{PACKAGE}-{VERSION}.tar.gz", "w:gz") as archive:
        for name, text in FILES.items():
            entry = tarfile.TarInfo(f"{PACKAGE}-{VERSION}/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    for name, value in {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("BELAYER_HOME", str(tmp_path / "home"))
    return folder


def fetch(version: str, target: Path) -> subprocess.CompletedProcess[str]:
    script = Path(testbed.__file__).with_name("pip_sdist.py")
    command = [sys.executable, str(script), PACKAGE, version, str(target)]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


def digest(folder: Path) -> str:
    """Of every file's name, mode and bytes."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        total.update(f"{path.relative_to(folder)} {path.stat().st_mode:o}\n".encode())
        total.update(path.read_bytes() if path.is_file() else b"")
    return total.hexdigest()


@pytest.mark.parametrize(
    ("package", "version"),
    [("", "1"), ("../x", "1"), ("x;rm", "1"), ("x", ""), ("x", "latest"), ("x", "1 2"), ("-x", "1"), ("x", "1/2")],
)
def test_what_is_no_package_is_refused(package: str, version: str) -> None:
    with pytest.raises(InputError, match="expected one as PyPI has it"):
        image_name(package, version)


def test_images_are_named_by_the_normal_form() -> None:
    assert image_name("Django", "2.2") == "belayer-testbed-django:2.2"
    assert image_name("a_b.C", "1!2.0+local") == "belayer-testbed-a-b-c:1_2.0_local"


def test_a_sdist_is_fetched_by_pip_and_not_built(shelf: Path, tmp_path: Path) -> None:
    target = tmp_path / "got.tar.gz"
    done = fetch(VERSION, target)
    assert done.returncode == 0, done.stderr
    assert target.read_bytes() == (shelf / f"{PACKAGE}-{VERSION}.tar.gz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["got.tar.gz", "shelf"]


def test_another_version_is_told_with_those_that_there_are(shelf: Path, tmp_path: Path) -> None:
    done = fetch("9.9", tmp_path / "got.tar.gz")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(f"no sdist of {PACKAGE} 9.9; its newest are {VERSION}")
    assert not (tmp_path / "got.tar.gz").exists()


def test_an_unknown_package_is_told(shelf: Path, tmp_path: Path) -> None:
    (shelf / f"{PACKAGE}-{VERSION}.tar.gz").unlink()
    done = fetch(VERSION, tmp_path / "got.tar.gz")
    assert done.returncode == 1
    assert f"finds no sdist of {PACKAGE}" in done.stderr


def test_the_repository_is_the_same_each_time(shelf: Path, tmp_path: Path) -> None:
    sdist = shelf / f"{PACKAGE}-{VERSION}.tar.gz"
    for name in ("first", "second"):
        testbed._make_repository(tmp_path / name, sdist, PACKAGE, VERSION)
    assert digest(tmp_path / "first") == digest(tmp_path / "second")
    git = ["git", "-C", str(tmp_path / "first")]
    assert subprocess.check_output([*git, "status", "--porcelain"]) == b""
    tracked = subprocess.check_output([*git, "ls-files"], text=True).split()
    assert sorted(tracked) == sorted(FILES)
    assert subprocess.check_output([*git, "rev-list", "--count", "HEAD"]) == b"1\n"


def test_a_truncated_sdist_is_named(shelf: Path, tmp_path: Path) -> None:
    sdist = shelf / f"{PACKAGE}-{VERSION}.tar.gz"
    sdist.write_bytes(sdist.read_bytes()[:100])
    with pytest.raises(NoTestbedError, match=r"remove .* and try again") as raised:
        testbed._make_repository(tmp_path / "first", sdist, PACKAGE, VERSION)
    assert str(sdist) in raised.value.remedy


@pytest.mark.sandbox
def test_the_image_holds_the_repository_and_is_built_once(shelf: Path, tmp_path: Path) -> None:
    steps: list[str] = []
    # What a build leaves that was killed: a container named after a process that is no more.
    dead = subprocess.Popen(["true"])
    dead.wait(timeout=DEADLINE_S)
    subprocess.run(
        ["docker", "create", "--name", f"belayer-testbed-build-{dead.pid}", testbed.BASE_IMAGE],
        check=True,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    image = build_testbed(PACKAGE, VERSION, say=steps.append)
    try:
        assert [step.split()[0] for step in steps] == ["fetching", "unpacking", "building"]
        assert build_testbed(PACKAGE, VERSION, say=steps.append) == image
        assert len(steps) == 3
        imported = "python -c 'import belayer_sample as s; print(s.answer)'"
        script = f"pwd; git status --porcelain; {imported}; stat -c %u:%Y setup.py"
        run = ["docker", "run", "--rm", "--network=none", image, "bash", "-c", script]
        assert subprocess.check_output(run, text=True, timeout=DEADLINE_S).split() == ["/testbed", "42", "0:946684800"]
        assert [path.name for path in (tmp_path / "home" / "sdists").iterdir()] == [f"{PACKAGE}-{VERSION}.tar.gz"]
        containers = subprocess.check_output(
            ["docker", "ps", "--all", "--format", "{{.Names}}"], text=True, timeout=DEADLINE_S
        )
        assert f"belayer-testbed-build-{dead.pid}" not in containers
        assert f"belayer-testbed-build-{os.getpid()}" not in containers
    finally:
        subprocess.run(["docker", "image", "rm", "--force", image], check=True, capture_output=True, timeout=DEADLINE_S)


@pytest.mark.sandbox
def test_a_version_that_is_not_there_leaves_nothing(shelf: Path, tmp_path: Path) -> None:
    with pytest.raises(NoTestbedError, match="by hand") as raised:
        build_testbed(PACKAGE, "9.9")
    assert raised.value.version == "9.9"
    assert list((tmp_path / "home" / "sdists").iterdir()) == []
