"""Runs one child for one owner: `python -I supervise.py OWNER_PID FOLDER_TO_REMOVE -- COMMAND...`, stdlib only.

Invariant: the child never outlives the owner. The owner's end is seen through a pidfd, however it ends; the child then
gets SIGTERM (so it saves what it has) and, after GRACE_S, SIGKILL. If this process itself is killed, the kernel kills
the child (PR_SET_PDEATHSIG, prctl(2)), which is sound here because this process has one thread: the signal comes when
the *thread* ends that made the child, so the owner, with its threads, must not be the parent.

Writes the child's pid as one line to stdout and exits with its exit status. FOLDER_TO_REMOVE ('' for none) is removed
once the owner is gone.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it was asked for
        os._exit(1)


def main() -> int:
    owner_pid, folder, _, *command = sys.argv[1:]
    try:
        owner = os.pidfd_open(int(owner_pid))
    except ProcessLookupError:
        return 0
    if os.getppid() != int(owner_pid):
        return 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    me = os.getpid()
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, preexec_fn=lambda: _die_with_parent(me)
    )

    def stop(_signal: int, _frame: object) -> None:
        child.terminate()

    signal.signal(signal.SIGTERM, stop)
    with contextlib.suppress(BrokenPipeError):
        os.write(1, b"%d\n" % child.pid)
    ended = os.pidfd_open(child.pid)
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    poll.register(ended, select.POLLIN)
    if ended not in [fd for fd, _ in poll.poll()]:
        child.terminate()
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
        child.wait()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    return abs(child.wait())


if __name__ == "__main__":
    sys.exit(main())
