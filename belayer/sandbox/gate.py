"""Holds a restore at the moment when all is in place and no process has run, to compare it with what was captured.

CRIU calls a script at its steps (`action-script`, criu(8)). At `pre-restore`, before anything, and at `pre-resume` ours
says so through one pipe and waits for leave to go on at another. What CRIU does not keep of the processes is given to
them; if they are not what they were, they are killed before leave is given: none of them ever runs. A script whose
restorer has died waits until the container is removed, which ends it (`tree.kill_users_of`).
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from belayer.errors import RestoreMismatchError, SandboxError
from belayer.sandbox import attributes
from belayer.sandbox.freezer import freezer_of
from belayer.sandbox.probe import Probe, difference
from belayer.sandbox.tree import kill_traced, outsiders

SCRIPT = """#!/bin/sh
case "$CRTOOLS_SCRIPT_ACTION" in
  pre-restore | pre-resume) ;;
  *) exit 0 ;;
esac
echo "$CRTOOLS_SCRIPT_ACTION ${{CRTOOLS_INIT_PID:-0}}" > "{work}/restored"
read -r leave < "{work}/leave"
[ "$leave" = yes ]
"""
END = b"end"


class Gate:
    """A context manager around a restore whose CRIU logs to `work`. RestoreMismatchError, at its end, instead of
    whatever the failed restore raised."""

    def __init__(
        self, checkpoint: str, expected: Probe, work: Path, memory: bool, prepare: Callable[[], object]
    ) -> None:
        """`memory`: whether pages are there before the processes run. `prepare`: called when Docker has done its part
        and CRIU has not begun; an error of it ends the restore and is raised at the end."""
        self._checkpoint = checkpoint
        self._expected = expected
        self._work = work
        self._memory = memory
        self._found: tuple[str, str, str] | None = None
        self._prepare = prepare
        self._failure: OSError | SandboxError | None = None
        self._watch = threading.Thread(target=self._run, name=f"gate of {checkpoint}", daemon=True)

    @property
    def settings(self) -> str:
        """For CRIU's configuration file."""
        return f"action-script {self._work / 'gate.sh'}\n"

    def __enter__(self) -> Gate:
        script = self._work / "gate.sh"
        script.write_text(SCRIPT.format(work=self._work))
        script.chmod(0o700)
        for name in ("restored", "leave"):
            os.mkfifo(self._work / name, 0o600)
        # Open for both, so that neither side ever waits for the other to open, or sees it close.
        self._restored = os.open(self._work / "restored", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._leave = os.open(self._work / "leave", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.write(self._restored, END + b"\n")  # should CRIU not have come so far
        self._watch.join()
        os.close(self._restored)
        os.close(self._leave)
        if self._found is not None:
            raise RestoreMismatchError(self._checkpoint, *self._found) from None
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while True:
            select.select([self._restored], [], [])
            step, *pid = os.read(self._restored, 64).splitlines()[0].split()
            if step == END:
                return
            leave = b"no\n"
            try:
                if step == b"pre-restore":
                    self._prepare()
                else:
                    self._compare(int(pid[0]))
                leave = b"yes\n"
            except (OSError, SandboxError) as error:
                self._failure = error
            finally:
                os.write(self._leave, leave)

    def _compare(self, init: int) -> None:
        self._found = ("the comparison", "whole", "cut short")  # unless it comes to its end
        freezer = freezer_of(init)
        found = [init] if freezer is None else freezer.processes()
        crius = set(outsiders(init, found))
        held = [pid for pid in found if pid not in crius]
        attributes.give(held, self._expected.unusual)
        self._found = difference(self._expected, held, self._memory)
        if self._found is not None:
            kill_traced(held)
