"""One engine's slot table and ledger, as the memory server keeps them: what the next engine adopts from.

Invariant: nobody but that engine ever writes them, so a dying engine's late writes meet nobody else's. They outlive
it until the engine after it has been succeeded.
"""

from __future__ import annotations

import os

from belayer.gpu import wire
from belayer.gpu.arena import ArenaOwner, Lendable
from belayer.gpu.ledger import Ledger


class Books:
    """`epoch`: that of the lease under which the engine writes; 0 before it has one."""

    def __init__(self, owner: ArenaOwner, request: wire.OpenArena) -> None:
        self._table = Lendable(owner, request.table_bytes)
        self._fd = os.memfd_create("belayer-ledger", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, request.ledger_bytes)
        self.ledger = Ledger(self._fd, int(request.spec["table_rows"]), int(request.spec["table_width"]))
        self.epoch = 0

    def to_write(self) -> tuple[int, int]:
        """Descriptors of table and ledger for their engine."""
        return self._table.lend(writable=True), os.dup(self._fd)

    def to_read(self) -> tuple[int, int]:
        """The same for a successor."""
        ledger = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        return self._table.lend(writable=False), ledger

    def release(self) -> None:
        self._table.release()
        self.ledger.close()
        os.close(self._fd)
