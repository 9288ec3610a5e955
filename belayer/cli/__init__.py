"""The command `belayer`."""

INTERRUPTED = 130
"""The exit status after Ctrl-C."""
