"""The process `belayer`: from its first import to its last breath, Ctrl-C ends it with 130 and without a traceback.

The command itself is in `belayer.cli.main`, whose imports take long enough to be interrupted. Once there is an exit
status nothing is left that Ctrl-C could stop, so it is not heard any more: a signal during Python's own tidying up
would replace the status by -2.
"""

from __future__ import annotations

import signal
import sys

from belayer.exits import INTERRUPTED


def main() -> None:
    """The entry point."""
    try:
        from belayer.cli.main import run

        status = run()
    except KeyboardInterrupt:
        status = INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(status)


if __name__ == "__main__":
    main()
