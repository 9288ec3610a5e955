"""`python -m replay audit FILE` and `python -m replay timeline FILE TRAJECTORY`: on a laptop, from an exported file.

Exit status as `belayer audit`: 0 clean, 1 findings, 2 what cannot be read, said in one line.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from belayer.errors import BelayerError


def main(arguments: list[str] | None = None) -> int:
    """Run one command line; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m replay", description="Read an exported journal offline.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    audit_parser = verbs.add_parser("audit", help="check that the journal hangs together")
    audit_parser.add_argument("file", type=Path)
    audit_parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    timeline_parser = verbs.add_parser("timeline", help="show what happened to a trajectory")
    timeline_parser.add_argument("file", type=Path)
    timeline_parser.add_argument("trajectory")
    timeline_parser.add_argument("--html", type=Path, help="write one HTML file instead")
    options = parser.parse_args(arguments)
    try:
        if options.verb == "audit":
            return _audit(options.file, options.json)
        return _timeline(options.file, options.trajectory, options.html)
    except BelayerError as error:
        print(f"replay: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _audit(file: Path, json: bool) -> int:
    from rich.console import Console

    from belayer.journal.export import read_export
    from belayer.journal.sealing import keyring_of
    from replay.audit import audit
    from replay.report import as_json, show

    report = audit(read_export(file), keyring_of(None))
    if json:
        print(as_json(report, str(file)))
    else:
        show(report, str(file), Console())
    return 1 if report.findings else 0


def _timeline(file: Path, trajectory: str, html: Path | None) -> int:
    from rich.console import Console

    from belayer.journal.sealing import keyring_of
    from replay.timeline.page import write_page
    from replay.timeline.source import from_file
    from replay.timeline.terminal import show

    story = from_file(file, trajectory, keyring_of(None))
    if html is None:
        show(story, Console())
    else:
        write_page(story, html)
        print(html)
    return 0


if __name__ == "__main__":
    sys.exit(main())
