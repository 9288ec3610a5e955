"""A process that deals with a memory server as an engine does, but without an engine: `python -m tests.gpu.lessee`.

It reads one JSON line a command from its standard input and answers each with one line: {"ok": ...} or {"error": ...}.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from typing import Any

from belayer.gpu import wire
from belayer.gpu.errors import ArenaError
from belayer.gpu.ledger import Ledger, ledger_bytes
from belayer.gpu.memory_client import MemoryClient
from tests.waiting import DEADLINE_S

ROWS, WIDTH = 4, 64
KV_BYTES, TABLE_BYTES = 1 << 16, 1 << 12
SPEC: wire.Spec = {"layers": 2, "tokens": 128, "table_rows": ROWS, "table_width": WIDTH}


class Lessee:
    def __init__(self) -> None:
        self.client: MemoryClient | None = None
        self.weights_fd = -1
        self.kv_fd = -1
        self.last_ledger_fd = -1
        self.ledger: Ledger | None = None

    def connect(self, path: str, incarnation: str, role: wire.Role) -> str:
        self.client, registered = MemoryClient.connect(path, incarnation, role)
        return registered.weights.state

    def open_weights(self, layout: str = "a", anew: bool = False) -> bool:
        assert self.client is not None
        lent, fds = self.client.ask(wire.OpenWeights({"layout": layout}, 4096, anew), wire.WeightsLent)
        self.weights_fd = fds[0]
        return lent.writable

    def begin(self, version: int) -> bool:
        assert self.client is not None
        lent, fds = self.client.ask(wire.BeginWeights(version), wire.WeightsLent)
        self.weights_fd = fds[0]
        return lent.writable

    def commit(self, version: int) -> bool:
        assert self.client is not None
        lent, fds = self.client.ask(wire.CommitWeights(version), wire.WeightsLent)
        self.weights_fd = fds[0]
        return lent.writable

    def write_weights(self, text: str) -> str:
        with mmap.mmap(self.weights_fd, 4096) as memory:
            memory[: len(text)] = text.encode()
        return "written"

    def read_weights(self, count: int) -> str:
        with mmap.mmap(self.weights_fd, 4096, access=mmap.ACCESS_READ) as memory:
            return memory[:count].decode()

    def open_arena(self, tokens: int = 128) -> int:
        assert self.client is not None
        request = wire.OpenArena({**SPEC, "tokens": tokens}, KV_BYTES, TABLE_BYTES, ledger_bytes(ROWS, WIDTH))
        lent, fds = self.client.ask(request, wire.ArenaLent)
        self.ledger = Ledger(fds[1], ROWS, WIDTH)
        if lent.epoch:
            self.kv_fd = fds[2]
        if lent.last_epoch:
            self.last_ledger_fd = fds[4]
        return lent.epoch

    def serve(self, epoch: int) -> str:
        assert self.client is not None and self.ledger is not None
        self.ledger.begin(epoch)
        self.client.tell(wire.Serving({"rows": ROWS}))
        return "serving"

    def ledger_write(self, row: int, tokens: list[int]) -> str:
        assert self.ledger is not None
        self.ledger.write(row, row, 0, tokens, 0)
        return "written"

    def begin_step(self, tokens: int) -> str:
        assert self.ledger is not None
        self.ledger.begin_step(tokens)
        return "begun"

    def update_call(self, begins: bool) -> str:
        """A call of a weight update begins or ends."""
        assert self.ledger is not None
        self.ledger.excuse(begins)
        return "said"

    def last_proven(self, epoch: int) -> dict[int, list[int]]:
        last = Ledger(self.last_ledger_fd, ROWS, WIDTH, writable=False)
        return {entry.row: list(entry.token_ids[: entry.proven]) for entry in last.proven(epoch)}

    def write_kv(self, text: str) -> str:
        with mmap.mmap(self.kv_fd, KV_BYTES) as memory:
            memory[: len(text)] = text.encode()
        return "written"

    def read_kv(self, count: int) -> str:
        with mmap.mmap(self.kv_fd, KV_BYTES, access=mmap.ACCESS_READ) as memory:
            return memory[:count].decode()

    def order(self) -> dict[str, Any]:
        """Wait for the server's next order; what comes with it is ours."""
        assert self.client is not None
        answer, fds = self.client.receive(DEADLINE_S)
        match answer:
            case wire.ArmNow():
                self.kv_fd = fds[0]
            case wire.Follow():
                self.last_ledger_fd = fds[1]
            case wire.Granted() | wire.Released():
                if answer.writable:
                    self.kv_fd = fds[0]
                if isinstance(answer, wire.Granted) and answer.follow:
                    self.last_ledger_fd = fds[-1]
            case _:
                pass
        return {"order": type(answer).__name__, **{name: getattr(answer, name) for name in answer.__struct_fields__}}

    def armed(self) -> str:
        assert self.client is not None
        self.client.tell(wire.Armed({}))
        return "armed"


def main() -> None:
    lessee = Lessee()
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        try:
            answer = {"ok": getattr(lessee, verb)(*arguments)}
        except ArenaError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        except OSError as error:
            answer = {"error": type(error).__name__, "message": os.strerror(error.errno or 0)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
