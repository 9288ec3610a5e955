"""One process's connection to the memory server. Blocking; every wait has a deadline.

When the server refuses, its typed error is raised here; when it is gone, MemoryServerGoneError.
"""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from types import TracebackType
from typing import TypeVar

from belayer.gpu import wire
from belayer.gpu.errors import ArenaRefusedError, MemoryServerGoneError

_Answer = TypeVar("_Answer", bound=wire.Answer)


class MemoryClient:
    """Made by `connect`; close it. Use it in one thread at a time."""

    def __init__(self, connection: socket.socket, path: str, timeout_s: float) -> None:
        self._connection = connection
        self._path = path
        self._timeout_s = timeout_s
        self._orders: deque[tuple[wire.Order, list[int]]] = deque()

    @classmethod
    def connect(
        cls, path: str | os.PathLike[str], incarnation: str, role: wire.Role, timeout_s: float = 30.0
    ) -> tuple[MemoryClient, wire.Registered]:
        """Connect and say who this is; the server's weights and arena come back."""
        client = cls.open(path, timeout_s)
        registered, _ = client.ask(wire.Register(incarnation, role), wire.Registered)
        return client, registered

    @classmethod
    def open(cls, path: str | os.PathLike[str], timeout_s: float = 30.0) -> MemoryClient:
        """Connect. The first that is said must be Register."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(str(path))
        except OSError as error:
            connection.close()
            raise MemoryServerGoneError(str(path), str(error)) from None
        return cls(connection, str(path), timeout_s)

    def fileno(self) -> int:
        """To wait for an order in a poll of one's own."""
        return self._connection.fileno()

    def ask(
        self, request: wire.Request, expected: type[_Answer], timeout_s: float | None = None
    ) -> tuple[_Answer, list[int]]:
        """Send a request and return its answer and descriptors, now the caller's."""
        self.tell(request)
        return self.answer(expected, timeout_s)

    def answer(self, expected: type[_Answer], timeout_s: float | None = None) -> tuple[_Answer, list[int]]:
        """The answer to the first thing that was told and not answered yet, and its descriptors, now the caller's."""
        while True:
            answer, fds = self.receive(self._timeout_s if timeout_s is None else timeout_s)
            if not isinstance(answer, wire.Order):
                break
            self._orders.append((answer, fds))
        if isinstance(answer, expected):
            return answer, fds
        for fd in fds:
            os.close(fd)
        if isinstance(answer, wire.Refused):
            wire.raise_refused(answer)
        raise ArenaRefusedError(f"it answered {type(answer).__name__}, not {expected.__name__}")

    def tell(self, request: wire.Request) -> None:
        """Send what has no answer (Armed, Serving), or one that is taken later with `answer`."""
        try:
            wire.send(self._connection, request)
        except OSError as error:
            raise MemoryServerGoneError(self._path, str(error)) from None

    def order(self) -> tuple[wire.Order, list[int]] | None:
        """The server's next order if there is one now; does not wait."""
        if self._orders:
            return self._orders.popleft()
        readable, _, _ = select.select([self._connection], [], [], 0)
        if not readable:
            return None
        answer, fds = self.receive(0)
        if isinstance(answer, wire.Order):
            return answer, fds
        raise ArenaRefusedError(f"it sent {type(answer).__name__} unasked")

    def event(self) -> wire.EngineEvent | wire.WeightsEvent | None:
        """After Watch or WatchWeights: the next event if there is one now; does not wait."""
        readable, _, _ = select.select([self._connection], [], [], 0)
        if not readable:
            return None
        answer, _ = self.receive(0)
        if isinstance(answer, wire.EngineEvent | wire.WeightsEvent):
            return answer
        raise ArenaRefusedError(f"it sent {type(answer).__name__} to a watcher")

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> MemoryClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def receive(self, timeout_s: float) -> tuple[wire.Answer, list[int]]:
        """The next message, whatever it is, and its descriptors, now the caller's."""
        readable, _, _ = select.select([self._connection], [], [], timeout_s)
        if not readable:
            raise MemoryServerGoneError(self._path, f"silent for {timeout_s:.1f} s")
        received = wire.receive_answer(self._connection)
        if received is None:
            raise MemoryServerGoneError(self._path, "it closed the connection")
        return received
