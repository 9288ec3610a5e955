"""A witness in each container: a process whose memory holds what no file does, to prove what was done to the sandbox.

It counts the actions that ran and chains their numbers and digests, in memory only. Each action begins with a poke, one
shell builtin that writes a line into the witness's FIFO. At the end the chain equals the undisturbed run's if, on the
live branch, every action ran, none ran twice, they ran in order, and the memory survived each restore. A witness that
is gone or does not answer is a WitnessError: a finding, not an infrastructure failure.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import NamedTuple

import msgspec

from belayer.errors import BelayerError
from belayer.journal.events import SandboxSpec

FOLDER = "/var/lib/belayer-witness"

_SCRIPT = f"""\
import hashlib, json, os, select, socket
count, chain = 0, bytes(16)
pokes = os.open("{FOLDER}/pokes", os.O_RDWR | os.O_NONBLOCK)
server = socket.socket(socket.AF_UNIX)
server.bind("{FOLDER}/answers")
server.listen(8)
poll = select.poll()
poll.register(pokes, select.POLLIN)
poll.register(server, select.POLLIN)
pending = b""
while True:
    asked = server.fileno() in [fd for fd, _ in poll.poll()]
    try:
        pending += os.read(pokes, 65536)
    except BlockingIOError:
        pass
    *lines, pending = pending.split(b"\\n")
    for line in lines:
        count, chain = count + 1, hashlib.blake2b(chain + line, digest_size=16).digest()
    if asked:
        asker, _ = server.accept()
        with asker:
            try:
                asker.sendall(json.dumps({{"actions": count, "chain": chain.hex()}}).encode())
            except OSError:
                pass
"""

SETUP = (
    f"mkdir -p {FOLDER} && mkfifo {FOLDER}/pokes && cat > {FOLDER}/witness.py <<'WITNESS'\n{_SCRIPT}WITNESS\n",
    f"setsid python3 -I -S {FOLDER}/witness.py </dev/null >/dev/null 2>&1 & "
    f"for try in $(seq 1 500); do [ -S {FOLDER}/answers ] && exit 0; sleep 0.02; done; exit 1",
)
"""Commands that start the witness in a fresh container."""


def is_watched(spec: SandboxSpec) -> bool:
    """Whether containers of this spec have a witness."""
    return spec.setup == SETUP


class WitnessError(BelayerError):
    """The witness of a container is gone."""


class WitnessState(NamedTuple):
    """How many actions the witness has seen, and the chain of their digests in hexadecimal."""

    actions: int
    chain: str


def watched(number: int, command: str) -> str:
    """The command as it is given to the sandbox: first a poke, which cannot block, then the command as it is."""
    digest = hashlib.blake2b(command.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{{ printf '%s\\n' '{number} {digest}' 1<>{FOLDER}/pokes; }} 2>/dev/null\n{command}"


async def ask(container_pid: int, timeout_s: float = 5.0) -> WitnessState:
    """The state of the witness in the container whose process 1 is `container_pid` on this host."""
    path = f"/proc/{container_pid}/root{FOLDER}/answers"
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                answer = await reader.read()
            finally:
                writer.close()
        return WitnessState(**msgspec.json.decode(answer))
    except (OSError, TimeoutError, msgspec.DecodeError, TypeError) as error:
        raise WitnessError(f"the witness at {path} does not answer ({error or type(error).__name__})") from None
