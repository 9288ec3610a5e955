"""The named durability modes, and for each the one sentence that says what can be lost."""

from __future__ import annotations

import enum


class Durability(enum.StrEnum):
    """What 'acknowledged' means."""

    MEMORY = "memory"
    EVERYSEC = "everysec"
    FSYNC = "fsync"
    REPLICATED = "replicated"


PROMISES = {
    Durability.MEMORY: (
        "An acknowledged event is in the server's memory; a crash or restart of the server may lose all of them."
    ),
    Durability.EVERYSEC: (
        "An acknowledged event is in the server's memory and on its disk within two seconds; a crash of the server or "
        "its machine may lose the events of the last two seconds, a server that is stopped in order loses none."
    ),
    Durability.FSYNC: (
        "An acknowledged event is on the disk of the primary (WAITAOF 1 0); it is lost only with that disk, or by a "
        "failover to a replica that lacked it."
    ),
    Durability.REPLICATED: (
        "An acknowledged event is in the memory of the primary and of n replicas (WAIT n); it is lost only if all of "
        "them crash within the second before it is on a disk, if the primary's machine crashes within that second and "
        "the primary starts again before a replica was promoted, or by a failover to another replica that lacked it."
    ),
}
"""Whatever was lost is found: who knew a lost event gets WrongSequenceError or DamagedJournalError when going on."""
