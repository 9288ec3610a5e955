"""Which PyPI sdist a trajectory's `/testbed` is made of.

`testbeds.json` beside the trajectory decides. Without it the name does: SWE-bench calls its tasks `owner__repository-
NUMBER`, numbers are pull requests, and for the repositories of the recorded trajectories the table below has, by
number, the released version nearest to the task. A sdist is of about the right version, never the very commit.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from belayer.demo.recording import SUFFIX
from belayer.errors import InputError

TESTBEDS = "testbeds.json"


class Package(NamedTuple):
    """A package on PyPI."""

    package: str
    version: str


_BY_NUMBER: dict[str, tuple[str, dict[int, str]]] = {
    "django__django": ("Django", {11100: "2.2", 12000: "2.2.5", 12800: "3.0", 13300: "3.1", 99999: "3.1.4"}),
    "pydicom__pydicom": ("pydicom", {1100: "2.0.0", 1300: "2.1.0", 1500: "2.2.0", 99999: "2.3.0"}),
    "sqlfluff__sqlfluff": ("sqlfluff", {1600: "0.6.6", 1999: "0.8.1", 99999: "0.10.0"}),
    "marshmallow-code__marshmallow": ("marshmallow", {1350: "3.0.0rc8", 99999: "3.0.0"}),
    "pvlib__pvlib-python": ("pvlib", {1100: "0.8.0", 1700: "0.9.4", 99999: "0.10.1"}),
    "pylint-dev__astroid": ("astroid", {1250: "2.8.0", 1500: "2.9.3", 99999: "2.13.2"}),
    "astropy__astropy": ("astropy", {7000: "3.0", 13000: "4.3", 99999: "5.2"}),
}


def package_of(path: Path) -> Package:
    """The package of a trajectory file. InputError when nothing tells it."""
    name = path.name.removesuffix(SUFFIX)
    table = path.parent / TESTBEDS
    if table.exists():
        try:
            testbeds = msgspec.json.decode(table.read_bytes(), type=dict[str, dict[str, str]])
            if name in testbeds:
                return Package(**testbeds[name])
        except (OSError, msgspec.DecodeError, TypeError) as error:
            raise InputError(f'{table}: expected {{"NAME": {{"package": ..., "version": ...}}}} ({error})') from None
    repository, number = re.fullmatch(r"(.*?)-?(\d*)", name, re.DOTALL).groups()  # type: ignore[union-attr]
    if repository not in _BY_NUMBER or not number:
        raise InputError(
            f"{path}: which package does it work on? Name it in {table}: "
            f'{{"{name}": {{"package": "NAME-ON-PYPI", "version": "1.0"}}}}'
        )
    package, versions = _BY_NUMBER[repository]
    return Package(package, next(version for last, version in versions.items() if int(number) <= last))
