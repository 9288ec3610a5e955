"""Reads what is in containers in a process of its own, since thousands of files take seconds of Python, in which the
rollouts of this process would stand still and recoveries seem slow.

The process is started when it is first needed, ends with its standard input, and remembers the contents that it has
read. One that dies, or is asked by somebody who does not wait for the answer, is replaced by the next who asks.

Request: the process id and a line's end. Answer: its length (u64, little-endian) and an `Answer`, pickled, because
names of files need not be text; it comes from our own code, never from a container.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
import sys
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

from belayer.demo.container_state import ContainerState, Digests, FileState, process_tree, read_files
from belayer.demo.witness import ask

_LENGTH = struct.Struct("<Q")


class Answer(NamedTuple):
    """The container's files, or why they could not be read."""

    files: dict[str, FileState]
    error: str = ""


class ContainerReader:
    """A context manager that leaves no process behind. Any number of tasks may ask; they take turns."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> ContainerReader:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def read(self, pid: int, *, watched: bool = True) -> ContainerState:
        """The state of the container whose process 1 is `pid` on this host. WitnessError when its witness is gone,
        OSError when the container is."""
        witness = await ask(pid) if watched else None
        async with self._turn:
            answer = await self._answer(pid)
        if answer.error:
            raise OSError(answer.error)
        return ContainerState(answer.files, process_tree(pid), witness)

    async def _answer(self, pid: int) -> Answer:
        """No answer is left unread: when this one is not waited for, its process is ended."""
        answer = None
        try:
            answer = await self._ask(pid)
            return answer
        except asyncio.IncompleteReadError:
            raise OSError("the process that reads containers has ended") from None
        finally:
            if answer is None:
                await self._end()

    async def _ask(self, pid: int) -> Answer:
        if self._process is None:
            command = (sys.executable, "-m", __name__)
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, start_new_session=True
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{pid}\n".encode())
        (length,) = _LENGTH.unpack(await self._process.stdout.readexactly(_LENGTH.size))
        return Answer(*pickle.loads(await self._process.stdout.readexactly(length)))

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def main() -> None:
    known: Digests = {}
    for line in sys.stdin:
        try:
            answer = Answer(read_files(int(line), known))
        except OSError as error:
            answer = Answer({}, str(error))
        encoded = pickle.dumps(tuple(answer))
        sys.stdout.buffer.write(_LENGTH.pack(len(encoded)) + encoded)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
