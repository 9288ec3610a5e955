"""What Redis's error replies mean to us."""

from __future__ import annotations

import hiredis

from belayer.errors import JournalError, ServerRefusedError

REFUSED_ID = "ERR The ID specified in XADD"
ASK = "ASK "
"""The key's slot is moving and the key has moved already: ask there, with ASKING, only this once."""
CLUSTER_DOWN = "CLUSTERDOWN"
"""Slots have no owner, as far as this node knows: it may be cut off from the others."""
ELSEWHERE = ("READONLY", "MASTERDOWN", "MOVED ", CLUSTER_DOWN)
"""Errors that say that this server is not, or no longer, the one for the key: connect again."""
TRANSIENT = (
    *(*ELSEWHERE, ASK, "TRYAGAIN", "UNBLOCKED"),
    *("LOADING", "BUSY ", "OOM", "MISCONF", "NOREPLICAS"),
)
"""Errors that pass: the command had no effect and is sent again until the deadline."""


class Again(Exception):
    """The command had no effect yet; `cause` says why."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class Refused(Exception):
    """The stream is not where the writer believed; look at it to say how."""


def is_transient(reply: hiredis.ReplyError) -> bool:
    """Whether the same command may succeed later. EXECABORT repeats the error of a command inside."""
    text = str(reply).removeprefix("EXECABORT Transaction discarded because of: ")
    return text.startswith((*TRANSIENT, "EXECABORT"))


def judged_error(address: str, reply: hiredis.ReplyError) -> Again | Refused | JournalError:
    """The error as an exception of ours."""
    if str(reply).startswith(REFUSED_ID):
        return Refused()
    return Again(str(reply)) if is_transient(reply) else refused_command(address, reply)


def refused_command(address: str, reply: hiredis.ReplyError) -> ServerRefusedError:
    """An error that no waiting will change: a wrong password, a missing permission, a key of another type."""
    text = str(reply)
    if text.startswith(("NOAUTH", "WRONGPASS", "ERR AUTH", "ERR Client sent AUTH", "ERR invalid password")):
        return ServerRefusedError(address, "the login failed", text, "check user and password in the journal's URL")
    return ServerRefusedError(
        address, "it refused a command", text, "docs/security.md lists what the user must be allowed"
    )
