"""Who is at the other end of a connection to the memory server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable

from belayer.gpu import wire
from belayer.gpu.books import Books


class Peer:
    """One connection and the process behind it, which the kernel named (SO_PEERCRED).

    `pidfd` is None once that process is dead; the connection may end earlier, and then `connected` is False.
    """

    def __init__(self, connection: socket.socket, pid: int, pidfd: int | None) -> None:
        self.connection = connection
        self.pid = pid
        self.pidfd = pidfd
        self.incarnation = ""
        self.role: wire.Role = "control"
        self.armed = False
        self.warm = False
        self.dying = False
        self.watches = self.watches_weights = False
        self.books: Books | None = None

    @property
    def alive(self) -> bool:
        return self.pidfd is not None

    @property
    def connected(self) -> bool:
        return self.connection.fileno() >= 0

    def kill(self) -> None:
        """SIGKILL. Death is seen, as any other, by the pidfd."""
        if self.pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def answer(self, message: wire.Answer, fds: tuple[int, ...] = ()) -> None:
        """Send, then close the descriptors. A receiver that is gone is noticed elsewhere."""
        try:
            if self.connected:
                wire.send(self.connection, message, fds)
        except OSError:
            pass
        finally:
            for fd in fds:
                os.close(fd)


Notify = Callable[[wire.EngineEvent], None]
"""Tells every watcher what happened to an engine."""
