"""Sends groups of writes over the one link of a shard, and judges what became of each.

Invariant: an XADD is sent only for a stream whose last event is known *over this very link* to be the one before the
entry. A new link (after a crash or failover of the server, or for the first append) therefore reads every stream's last
entry before its next append: events that the server lost are found there, never papered over by a gap.

Every attempt settles the writes whose outcome it learned and leaves the others as they are, to be tried again. A write
that was stored by an attempt whose replies were lost is recognised by its bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import hiredis

from belayer.errors import JournalError, ServerRefusedError
from belayer.journal.address import Address
from belayer.journal.codec import Entry
from belayer.journal.durability import Durability
from belayer.journal.keys import Keys, entry_id, stored_entry
from belayer.journal.link import Link, LinkLostError, Reply, pack
from belayer.journal.outcome import check_chain
from belayer.journal.replies import ELSEWHERE, Again, Refused, judged_error, refused_command
from belayer.journal.server_checks import check_server
from belayer.journal.writes import EMPTY, Append, Tail

_MOST_TAILS = 200_000


class Sender:
    """The link of one shard and what is known over it."""

    def __init__(self, address: Address, keys: Keys, shard: int, durability: Durability, replicas: int) -> None:
        self.address = address.shown
        self._address = address
        self._keys = keys
        self._shard = shard
        self._durability = durability
        self._replicas = replicas
        self._link: Link | None = None
        self._linking = asyncio.Lock()
        self._was_linked = False
        self._tails: dict[bytes, Tail] = {}

    async def attempt(self, group: Sequence[Append], timeout_s: float) -> str:
        """Try to store the writes, each of another stream; why some of them are still unsettled, if they are."""
        try:
            await self._send(await self.linked(timeout_s), group, timeout_s)
        except (LinkLostError, Again) as error:
            return error.cause
        except JournalError as error:
            for write in group:
                write.settle(error)
        return "a stream changed while it was looked at"

    async def linked(self, timeout_s: float) -> Link:
        """The link, opened anew and checked when it was lost; what was known about streams is then forgotten.

        A server that is found unfit after a reconnect (a demoted primary, say) is waited for like one that is away.
        """
        if self._link is not None and not self._link.is_lost:
            return self._link
        async with self._linking:
            if self._link is not None and not self._link.is_lost:
                return self._link
            self.close()
            link = await Link.open(self._address, f"belayer-lane-{self._shard}", timeout_s)
            try:
                await check_server(link, self.address, self._durability, self._replicas, timeout_s)
            except BaseException as error:
                link.close()
                if isinstance(error, ServerRefusedError) and self._was_linked:
                    raise LinkLostError(str(error)) from None
                raise
            self._link = link
            self._was_linked = True
            return link

    def close(self) -> None:
        """Let the link go, and with it what was known."""
        self._tails.clear()
        if self._link is not None:
            self._link.close()
            self._link = None

    async def _send(self, link: Link, group: Sequence[Append], timeout_s: float) -> None:
        """One attempt at the group. Again when some writes must wait; LinkLostError when their outcome is unknown."""
        tails = self._tails
        found: list[Append] = []
        if unknown := [write for write in group if not write.follows(tails.get(write.key))]:
            found = await self._look(link, unknown, timeout_s)
            group = [write for write in group if not write.done.done() and write not in found]
        packed: list[bytes] = []
        count = 0
        for write in group:
            write.pack(packed, self._keys, self._shard, tails.get(write.key) == EMPTY)
            count += write.replies
        packed += (confirm := self._confirm(timeout_s, bool(found)))
        replies = await link.exchange(packed, count + len(confirm), timeout_s)
        stored, refused, again = self._judge(group, replies)
        if confirm:
            self._check_confirmed(replies[-1])
        if link is self._link:
            for write in stored:
                tails[write.key] = (write.entry.last_sequence, write.entry.digest)
        if refused and (late := await self._look(link, refused, timeout_s)):
            if confirm := self._confirm(timeout_s, True):
                self._check_confirmed((await link.exchange(confirm, len(confirm), timeout_s))[-1])
            found += late
        for write in stored:
            if not write.done.done():
                write.done.set_result(None)
        for write in found:
            write.settle(None)
        if again:
            if again.startswith(ELSEWHERE):
                link.close()
            raise Again(again)

    def _judge(self, group: Sequence[Append], replies: Sequence[Reply]) -> tuple[list[Append], list[Append], str]:
        """The writes that are stored, those that were refused by their id, and why the others must be sent again."""
        stored: list[Append] = []
        refused: list[Append] = []
        again = ""
        at = 0
        for write in group:
            end = at + write.replies
            if type(replies[at]) is bytes and write.replies == 1:
                stored.append(write)
                at = end
                continue
            try:
                if write.judge(self.address, replies, at, end):
                    stored.append(write)
            except Again as error:
                again = error.cause
            except Refused:
                refused.append(write)
            except JournalError as error:
                write.settle(error)
            at = end
        return stored, refused, again

    async def _look(self, link: Link, writes: list[Append], timeout_s: float) -> list[Append]:
        """Read where the streams are. Returns the writes that are stored already, settles those that can never be.

        For the others the last sequence is known from here on.
        """
        packed: list[bytes] = []
        for write in writes:
            identifier = entry_id(write.entry)
            packed.append(pack((b"XREVRANGE", write.key, b"+", b"-", b"COUNT", b"1")))
            packed.append(pack((b"XRANGE", write.key, identifier, identifier)))
        replies = await link.exchange(packed, len(packed), timeout_s)
        if len(self._tails) > _MOST_TAILS:
            self._tails.clear()
        found: list[Append] = []
        for write, newest, same_id in zip(writes, replies[::2], replies[1::2], strict=True):
            try:
                last, stored = self._entry(write, newest), self._entry(write, same_id)
                if link is self._link:
                    self._tails[write.key] = EMPTY if last is None else (last.last_sequence, b"")
                if stored is not None and stored.body == write.entry.body:
                    found.append(write)
                elif error := check_chain(write.stream, write.entry, last):
                    write.settle(error)
            except JournalError as error:
                write.settle(error)
        return found

    def _entry(self, write: Append, reply: Reply) -> Entry | None:
        """The one entry of a range, if there is one. Again or a JournalError when the server did not say."""
        if isinstance(reply, hiredis.ReplyError):
            error = judged_error(self.address, reply)
            raise error if not isinstance(error, Refused) else Again(str(reply))
        return stored_entry(write.stream, *reply[0]) if reply else None

    def _confirm(self, timeout_s: float, mark: bool) -> list[bytes]:
        """Commands that answer once this link's writes are as durable as promised.

        They cover what *this link* wrote, so for a write found from another link a mark is written first.
        """
        wait_ms = str(max(1, int(timeout_s * 900)))
        match self._durability:
            case Durability.MEMORY | Durability.EVERYSEC:
                return []
            case Durability.FSYNC:
                command = pack((b"WAITAOF", b"1", b"0", wait_ms))
            case Durability.REPLICATED:
                command = pack((b"WAIT", str(self._replicas), wait_ms))
        return [pack((b"SET", self._keys.mark(self._shard), b"1")), command] if mark else [command]

    def _check_confirmed(self, reply: Reply) -> None:
        """Again when the reply says that the writes are stored but not yet as durable as promised.

        A server that cannot say so any more (it became a replica) is left for the one that the address leads to then.
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
                raise refused_command(self.address, reply)
            self.close()
            raise LinkLostError(str(reply))
        if confirmed < wanted:
            raise Again(f"{confirmed} of {wanted} {what} have it")
