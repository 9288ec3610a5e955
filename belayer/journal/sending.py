"""Sends groups of writes over the one link of a shard, and judges what became of each.

Invariant: an XADD is sent only for a stream whose last event is known *over this very link* to be the one before the
entry. A new link (after a crash or failover of the server, or for the first append) therefore reads every stream's last
entry before its next append: events that the server lost are found there, never papered over by a gap. Those that are
still held are stored again before anything else (`belayer.journal.restoring`).

Every attempt settles the writes whose outcome it learned and leaves the others as they are, to be tried again. A write
that was stored by an attempt whose replies were lost is recognised by its bytes.

While a cluster moves the shard's slot, streams that have moved already are written over a second link to the node that
imports the slot, by the same rules; a write that needs keys on both sides is tried again until they are together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Sequence

import hiredis

from belayer.errors import JournalError, ServerRefusedError, WrongSequenceError
from belayer.journal.codec import Entry
from belayer.journal.confirming import Confirmation
from belayer.journal.durability import Durability
from belayer.journal.held import Held
from belayer.journal.keys import Keys, entry_id, stored_entry
from belayer.journal.link import Link, LinkLostError, Reply, pack
from belayer.journal.outcome import check_chain
from belayer.journal.replies import ASK, ELSEWHERE, Again, Refused, judged_error
from belayer.journal.restoring import Restorer
from belayer.journal.route import Route
from belayer.journal.server import ASKING
from belayer.journal.server_checks import check_server
from belayer.journal.writes import EMPTY, Append, Tail

_MOST_TAILS = 200_000
_PING = pack((b"PING",))


class Known:
    """A link and what is known over it: the last event of each stream. `asking`: to the importer of a moving slot."""

    def __init__(self, link: Link, asking: bool = False) -> None:
        self.link = link
        self.prefix = [ASKING] if asking else []
        """What goes before each write and each question."""
        self.tails: dict[bytes, Tail] = {}


class _Left:
    """The writes that one attempt could not settle, and why."""

    def __init__(self) -> None:
        self.writes: set[Append] = set()
        self.asked: list[Append] = []
        self.asked_reply = ""
        self.cause = ""

    def add(self, write: Append, cause: str) -> None:
        self.writes.add(write)
        if cause.startswith(ASK):
            self.asked.append(write)
            self.asked_reply = cause
        elif not self.cause.startswith(ELSEWHERE):
            self.cause = cause


class Sender:
    """The link of one shard and what is known over it."""

    def __init__(
        self,
        route: Route,
        keys: Keys,
        shard: int,
        durability: Durability,
        replicas: int,
        *,
        is_cluster: bool = False,
        held_bytes: int = 0,
    ) -> None:
        self.address = route.shown
        self._route = route
        self._keys = keys
        self._shard = shard
        self.durability = durability
        self._replicas = replicas
        self._is_cluster = is_cluster
        self._confirmation = Confirmation(durability, replicas, keys.mark(shard), route.shown)
        self._held = Held(held_bytes)
        self._restorer = Restorer(self._held, keys, shard, self._confirmation, route.shown)
        self._home: Known | None = None
        self._importer: Known | None = None
        self._linking = asyncio.Lock()
        self._was_linked = False

    async def attempt(self, group: Sequence[Append], timeout_s: float) -> str:
        """Try to store the writes, each of another stream; why some of them are still unsettled, if they are."""
        try:
            left = await self._send(await self.linked(timeout_s), group, timeout_s)
            if left.asked:
                importer = await self._linked_importer(left.asked_reply, timeout_s)
                left = await self._send(importer, left.asked, timeout_s)
        except (LinkLostError, Again) as error:
            return error.cause
        except JournalError as error:
            for write in group:
                write.settle(error)
            return ""
        return left.cause or "a stream changed while it was looked at"

    async def linked(self, timeout_s: float) -> Known:
        """The link, opened anew and checked when it was lost; what was known about streams is then forgotten."""
        if self._home is not None and not self._home.link.is_lost:
            return self._home
        async with self._linking:
            if self._home is None or self._home.link.is_lost:
                self.close()
                home = Known(await self._checked(self._route.open(self._name, timeout_s), timeout_s))
                try:
                    home.tails = await self._restorer.restore(home.link, timeout_s)
                except BaseException as error:
                    home.link.close()
                    if isinstance(error, Again) and error.cause.startswith(ELSEWHERE):
                        self._route.redirected(error.cause)
                    raise
                self._home = home
                self._was_linked = True
            return self._home

    async def look_after(self, timeout_s: float) -> None:
        """To be called every second: what is held is stored again soon after a failover, also when nothing is sent.

        Nothing happens when nothing is held. What fails now is tried again the next time, or by the next attempt.
        """
        if not self._held and not self._restorer.gaps:
            return
        with contextlib.suppress(LinkLostError, Again, JournalError):
            home = await self.linked(timeout_s)
            if self._restorer.gaps:
                home.tails |= await self._restorer.restore(home.link, timeout_s)
            if await self._route.is_current(home.link, timeout_s):
                await home.link.exchange([_PING], 1, timeout_s)
                self._held.prune()
            else:
                home.link.close()

    def forget(self, key: bytes) -> None:
        """The stream is removed: nothing of it is to be stored again."""
        self._held.forget({key})

    async def _linked_importer(self, asked: str, timeout_s: float) -> Known:
        """The link to the node that an ASK reply names; it lasts as long as the link to the slot's owner."""
        async with self._linking:
            if self._importer is None or self._importer.link.is_lost:
                link = await self._checked(self._route.open_asked(asked, self._name, timeout_s), timeout_s)
                self._importer = Known(link, asking=True)
            return self._importer

    async def _checked(self, opening: Awaitable[Link], timeout_s: float) -> Link:
        """The link to a server that can keep the mode's promise.

        One that is found unfit after a reconnect (a demoted primary, say) is waited for like one that is away.
        """
        link: Link | None = None
        try:
            link = await opening
            await check_server(link, self.address, self.durability, self._replicas, self._is_cluster, timeout_s)
            return link
        except BaseException as error:
            if link is not None:
                link.close()
            if isinstance(error, ServerRefusedError) and self._was_linked:
                raise LinkLostError(str(error)) from None
            raise

    def close(self) -> None:
        """Let the links go, and with them what was known."""
        for known in (self._home, self._importer):
            if known is not None:
                known.link.close()
        self._home = self._importer = None

    @property
    def _name(self) -> str:
        return f"belayer-lane-{self._shard}"

    async def _send(self, known: Known, group: Sequence[Append], timeout_s: float) -> _Left:
        """One attempt at the group; what is left of it. LinkLostError or Again: all that is unsettled is left."""
        left = _Left()
        tails = known.tails
        found: list[Append] = []
        if unknown := [write for write in group if not write.follows(tails.get(write.key))]:
            found = await self._look(known, unknown, left, timeout_s)
            without = left.writes.union(found)
            group = [write for write in group if not write.done.done() and write not in without]
        packed: list[bytes] = []
        count = 0
        prefix = known.prefix
        for write in group:
            if prefix:
                packed += prefix
            write.pack(packed, self._keys, self._shard, tails.get(write.key) == EMPTY)
            count += write.replies
        count += len(prefix) * len(group)
        packed += (confirm := self._confirm(known, found, left, timeout_s))
        replies = await known.link.exchange(packed, count + len(confirm), timeout_s)
        stored, refused = self._judge(known, group, replies, left)
        if left.cause.startswith(ELSEWHERE):
            self._route.redirected(left.cause)
            known.link.close()
        if confirm:
            self._check_confirmed(replies[-1])
        for write in stored:
            tails[write.key] = (write.entry.last_sequence, write.entry.digest)
        if refused and (late := await self._look(known, refused, left, timeout_s)):
            if confirm := self._confirm(known, late, left, timeout_s):
                self._check_confirmed((await known.link.exchange(confirm, len(confirm), timeout_s))[-1])
            found += late
        for write in stored:
            if not write.done.done():
                write.done.set_result(None)
        for write in found:
            write.settle(None)
        self._held.add([*stored, *found] if found else stored)
        return left

    def _judge(
        self, known: Known, group: Sequence[Append], replies: Sequence[Reply], left: _Left
    ) -> tuple[list[Append], list[Append]]:
        """The writes that are stored and those that were refused by their id; the others are added to what is left."""
        stored: list[Append] = []
        refused: list[Append] = []
        at = 0
        ahead = len(known.prefix)
        for write in group:
            at += ahead
            end = at + write.replies
            if type(replies[at]) is bytes and write.replies == 1:
                stored.append(write)
                at = end
                continue
            try:
                if write.judge(self.address, replies, at, end):
                    stored.append(write)
            except Again as error:
                left.add(write, error.cause)
            except Refused:
                refused.append(write)
            except JournalError as error:
                write.settle(error)
            at = end
        return stored, refused

    async def _look(self, known: Known, writes: list[Append], left: _Left, timeout_s: float) -> list[Append]:
        """Read where the streams are. Returns the writes that are stored already, settles those that can never be.

        For the others the last sequence is known from here on, or they are added to what is left.
        """
        packed: list[bytes] = []
        for write in writes:
            identifier = entry_id(write.entry)
            packed += known.prefix
            packed.append(pack((b"XREVRANGE", write.key, b"+", b"-", b"COUNT", b"1")))
            packed += known.prefix
            packed.append(pack((b"XRANGE", write.key, identifier, identifier)))
        replies = (await known.link.exchange(packed, len(packed), timeout_s))[
            len(known.prefix) :: 1 + len(known.prefix)
        ]
        if len(known.tails) > _MOST_TAILS:
            known.tails.clear()
        found: list[Append] = []
        for write, newest, same_id in zip(writes, replies[::2], replies[1::2], strict=True):
            try:
                last, stored = self._entry(write, newest), self._entry(write, same_id)
                if last is None and known.prefix and write.entry.expected_sequence:
                    raise Again("only a part of what the append needs has moved yet")
                known.tails[write.key] = EMPTY if last is None else (last.last_sequence, b"")
                if stored is not None and stored.body == write.entry.body:
                    found.append(write)
                elif error := check_chain(write.stream, write.entry, last):
                    if write.key in self._restorer.gaps and isinstance(error, WrongSequenceError):
                        raise Again("another writer may still store again what comes before it")
                    write.settle(error)
            except Again as error:
                left.add(write, error.cause)
            except JournalError as error:
                write.settle(error)
        return found

    def _entry(self, write: Append, reply: Reply) -> Entry | None:
        """The one entry of a range, if there is one. Again or a JournalError when the server did not say."""
        if isinstance(reply, hiredis.ReplyError):
            error = judged_error(self.address, reply)
            raise error if not isinstance(error, Refused) else Again(str(reply))
        return stored_entry(write.stream, *reply[0]) if reply else None

    def _confirm(self, known: Known, found: list[Append], left: _Left, timeout_s: float) -> list[bytes]:
        """The commands that ask whether all is as durable as promised. What was found needs the shard's mark, which
        must not be created on both sides of a slot that moves, so there it is left for later."""
        if found and known.prefix and self._confirmation.is_needed:
            for write in found:
                left.add(write, "the slot is moving")
            found.clear()
        return self._confirmation.commands(timeout_s, bool(found))

    def _check_confirmed(self, reply: Reply) -> None:
        try:
            self._confirmation.check(reply)
        except LinkLostError:
            self.close()
            raise
