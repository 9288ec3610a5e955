"""Log lines of all verbs: on stderr, each with trajectory, epoch and sequence where it has to do with one.

Lines for a person on a terminal, JSON for everything else. stdout is for a verb's own output alone.
"""

from __future__ import annotations

import logging
import sys


def configure_log(least: int = logging.INFO) -> None:
    """From here on structlog writes as described, lines of that level and above."""
    import structlog

    from belayer.observe.position import add_position

    terminal = sys.stderr.isatty()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(least),
        processors=[
            structlog.contextvars.merge_contextvars,
            add_position,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if terminal else [structlog.processors.format_exc_info]),
            # rich would show variables, and with them passwords and keys
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
            if terminal
            else structlog.processors.JSONRenderer(default=str),
        ],
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
