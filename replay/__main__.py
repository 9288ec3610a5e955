"""`python -m replay audit FILE` and `python -m replay timeline FILE TRAJECTORY`: on a laptop, from an exported file.

Exit status as `belayer audit`: 0 clean, 1 findings, 2 what cannot be read, said in one line (docs/cli.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from belayer import __version__
from belayer.errors import BelayerError
from belayer.exits import INTERRUPTED, USAGE, guarded

_EXAMPLES = """examples:
  python -m replay audit night.belayer
  python -m replay audit night.belayer --json
  python -m replay timeline night.belayer django-11039
  python -m replay timeline night.belayer django-11039 --html django.html

exit status: 0 clean, 1 findings, 2 what cannot be read, 130 interrupted
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command line; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m replay",
        description="Read an exported journal offline (`belayer export` writes one).",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"replay of Belayer {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True)
    audit_parser = verbs.add_parser("audit", help="check that the journal hangs together")
    audit_parser.add_argument("file", type=Path, help="the exported file")
    audit_parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    timeline_parser = verbs.add_parser("timeline", help="show what happened to a trajectory")
    timeline_parser.add_argument("file", type=Path, help="the exported file")
    timeline_parser.add_argument("trajectory", help="its name; a wrong one is answered with those that are there")
    timeline_parser.add_argument("--html", type=Path, help="write one HTML file instead")
    options = parser.parse_args(arguments)
    return guarded("replay", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    try:
        if options.verb == "audit":
            return _audit(options.file, options.json)
        return _timeline(options.file, options.trajectory, options.html)
    except BelayerError as error:
        line = " ".join(str(error).split())
        print(f"replay: {line}", file=sys.stderr)
        if options.verb == "audit" and options.json:
            print(json.dumps({"error": {"type": type(error).__name__, "message": line}}))
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED


def _audit(file: Path, as_json: bool) -> int:
    from rich.console import Console

    from belayer.journal.export import read_export
    from belayer.journal.sealing import keyring_of
    from replay.audit import audit
    from replay.report import as_json as report_json
    from replay.report import show

    report = audit(read_export(file), keyring_of(None))
    if as_json:
        print(report_json(report, str(file)))
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
