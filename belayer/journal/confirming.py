"""Asking a server whether what a link wrote is as durable as the mode promises.

Nothing is acknowledged before the answer is yes. A 'no' (a replica lags or is away, a disk is slow) means that the
writes are stored but must not be acknowledged yet; they are asked about again until the deadline.
"""

from __future__ import annotations

import hiredis

from belayer.journal.durability import Durability
from belayer.journal.link import LinkLostError, Reply, pack
from belayer.journal.replies import Again, refused_command


class Confirmation:
    """The question of one mode. `mark`: the key of the shard that is written to ask about another link's writes."""

    def __init__(self, durability: Durability, replicas: int, mark: bytes, address: str) -> None:
        self._durability = durability
        self._replicas = replicas
        self._mark = mark
        self._address = address

    @property
    def is_needed(self) -> bool:
        """Whether the mode promises more than that the server has it in memory."""
        return self._durability in (Durability.FSYNC, Durability.REPLICATED)

    def commands(self, timeout_s: float, mark: bool) -> list[bytes]:
        """Commands whose last reply answers for all that was written over the link before them.

        They cover what *this link* wrote, so for a write found from another link a mark is written first.
        """
        wait_ms = str(max(1, int(timeout_s * 500)))  # well within the time, so that a 'no' comes before we hang up
        match self._durability:
            case Durability.MEMORY | Durability.EVERYSEC:
                return []
            case Durability.FSYNC:
                command = pack((b"WAITAOF", b"1", b"0", wait_ms))
            case Durability.REPLICATED:
                command = pack((b"WAIT", str(self._replicas), wait_ms))
        return [pack((b"SET", self._mark, b"1")), command] if mark else [command]

    def check(self, reply: Reply) -> None:
        """Again when the reply says that the writes are not yet as durable as promised.

        LinkLostError when the server cannot say so any more: it became a replica.
        """
        match self._durability:
            case Durability.MEMORY | Durability.EVERYSEC:
                return
            case Durability.FSYNC:
                confirmed = int(reply[0]) if isinstance(reply, list) else 0  # pyright: ignore[reportUnknownArgumentType]
                wanted, what = 1, "disks"
            case Durability.REPLICATED:
                confirmed, wanted, what = reply if isinstance(reply, int) else 0, self._replicas, "replicas"
        if isinstance(reply, hiredis.ReplyError):
            if str(reply).startswith("NOPERM"):
                raise refused_command(self._address, reply)
            raise LinkLostError(str(reply))
        if confirmed < wanted:
            raise Again(f"{confirmed} of {wanted} {what} have it")
