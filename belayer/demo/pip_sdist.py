"""Fetches one sdist with pip's own session, and runs nothing of what is inside. A script, for a process of its own:

    python pip_sdist.py PACKAGE VERSION FILE

pip's settings hold (index, certificates, proxy, credentials, cache). `pip download` would do but for one thing: it runs
the package's build to learn its metadata, and that of an old package fails on a new Python. So this asks the same parts
of pip that `pip index versions` asks. They are not a public interface: where they have changed, it says so and ends
with status 3, and a person can put the file in place by hand. Status 1: not found or not fetched; the last line of
standard error says why. FILE appears complete, its digest checked against the index's, or not at all.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

ARCHIVES = (".tar.gz", ".tar.bz2", ".tar.xz", ".tgz")
_SHOWN = 8


def fetch(package: str, version: str, target: Path) -> str:
    """Put the sdist at `target`; the reason when that cannot be, else an empty string."""
    from pip._internal.commands.download import DownloadCommand
    from pip._vendor.packaging.version import parse

    command = DownloadCommand("download", "")
    options, _ = command.parse_args(["--ignore-requires-python", "--no-binary", ":all:"])
    with command.main_context():
        session = command._build_session(options)
        finder = command._build_package_finder(options, session, ignore_requires_python=True)
        candidates = [c for c in finder.find_all_candidates(package) if c.link.filename.endswith(ARCHIVES)]
        if not candidates:
            return f"pip finds no sdist of {package}; is the name right, the network up, `pip config list` in order?"
        fitting = [c for c in candidates if str(c.version) == str(parse(version))]
        if not fitting:
            newest = sorted({c.version for c in candidates}, reverse=True)[:_SHOWN]
            return f"pip's index has no sdist of {package} {version}; its newest are {', '.join(map(str, newest))}"
        link = fitting[-1].link
        response = session.get(link.url_without_fragment, headers={"Accept-Encoding": "identity"})
        response.raise_for_status()
        content: bytes = response.content
    if link.hash_name and hashlib.new(link.hash_name, content).hexdigest() != link.hash:
        return f"what came for {link.filename} has not the {link.hash_name} that the index names; try again"
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
    return ""


def main() -> int:
    package, version, target = sys.argv[1:]
    try:
        problem = fetch(package, version, Path(target))
    except (ImportError, AttributeError, TypeError) as error:
        sys.stderr.write(f"this pip cannot be asked for sdists ({error})\n")
        return 3
    except OSError as error:  # requests' errors are OSErrors too
        problem = f"{package} {version} was not fetched: {error}"
    if problem:
        sys.stderr.write(problem.replace("\n", " ") + "\n")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
