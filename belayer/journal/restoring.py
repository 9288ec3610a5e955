"""Finds acknowledged events that a server has lost, and stores them again, over a link that was just opened.

For each stream of which newest writes are held: the newest one is there byte for byte, so nothing was lost (a server
loses only the end of a stream); or the stream ends before it, and what is missing is appended again, the same bytes
with the same event ids; or something else is in its place (another writer went on without the lost events), which only
the digests tell. What was lost is written to the shard's stream of losses, restored or not. Whoever goes on writing
where events could not be restored gets FencedError, WrongSequenceError or DamagedJournalError.

Writers that followed each other within seconds hold a part each. Whoever finds that something before its own part is
missing waits for GAP_S, in which the earlier writer may store it again.

A stream that its owner removed has left a mark for a minute, so it does not come back; the mark names its first entry,
because another stream of that name may have begun since. One that was trimmed begins after what is held.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import hiredis
import structlog

from belayer.errors import CodecError, JournalError
from belayer.ids import StreamId
from belayer.journal.codec import Entry, decode_entry, digest_of, previous_digest_of
from belayer.journal.confirming import Confirmation
from belayer.journal.held import Held
from belayer.journal.keys import Keys, entry_id, stored_entry
from belayer.journal.link import Link, Reply, pack
from belayer.journal.replies import ASK, Again, Refused, judged_error
from belayer.journal.store import Loss
from belayer.journal.writes import EMPTY, Append, Tail

GAP_S = 5.0
_LATE_S = 3.0
"""How late somebody may look whether a gap's time is over."""
_STREAMS_AT_ONCE = 256
_APPEND_AGAIN = b"""
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if (last and last[1] or '') ~= ARGV[2] or (last and last[2][2] or '') ~= ARGV[3] then return 0 end
for at = 4, #ARGV, 3 do
  redis.call('XADD', KEYS[1], ARGV[at], 'e', ARGV[at + 1])
  if ARGV[at + 2] ~= '' then
    redis.call('XADD', KEYS[3], '*', 's', ARGV[1], 't', ARGV[at + 2])
  end
end
redis.call('SADD', KEYS[2], ARGV[1])
return 1
"""
"""KEYS: stream, names, control. ARGV: the stream's name, id and body of the entry that was last ('' for none), then id,
body and notice ('' for none) of each missing entry. One step, so that no gap can come about and nobody in between."""
_LOSSES_MAXLEN = b"100000"

log = structlog.get_logger("belayer.journal")


class _Place(NamedTuple):
    """What the server has of one stream: its first and last entry, the one at our newest id, the mark of removal."""

    first: Entry | None
    last: Entry | None
    ours: Entry | None
    removed: bytes | None

    def is_removed(self, writes: list[Append]) -> bool:
        """Whether the writes belong to a stream that was removed."""
        if self.removed is None:
            return False
        if writes[0].entry.expected_sequence:
            return self.last is None
        return self.removed in (b"", removal_mark(writes[0].entry))


class Restorer:
    """For one shard; what it has found is told once."""

    def __init__(self, held: Held, keys: Keys, shard: int, confirmation: Confirmation, address: str) -> None:
        self._held = held
        self._keys = keys
        self._shard = shard
        self._confirmation = confirmation
        self._address = address
        self._unconfirmed = False
        self._found: dict[bytes, Loss] = {}
        """What is not reported yet, of each stream."""
        self.gaps: dict[bytes, float] = {}
        """Streams of which something before what is held is missing, and until when that is waited for."""

    async def restore(self, link: Link, timeout_s: float) -> dict[bytes, Tail]:
        """Look at every stream of which something is held, store again what is missing; where these streams end now.

        Again or LinkLostError when the server cannot now: to be called again over the next link.
        """
        tails: dict[bytes, Tail] = {}
        streams = self._held.by_stream()
        for start in range(0, len(streams), _STREAMS_AT_ONCE):
            await self._restore_some(link, streams[start : start + _STREAMS_AT_ONCE], tails, timeout_s)
        if self._unconfirmed and (confirm := self._confirmation.commands(timeout_s, mark=True)):
            self._confirmation.check((await link.exchange(confirm, len(confirm), timeout_s))[-1])
        self._unconfirmed = False
        held = {writes[0].key for writes in streams}
        self.gaps = {key: until for key, until in self.gaps.items() if key in held}
        if self._found:
            await self._report(link, timeout_s)
        return tails

    async def _restore_some(
        self, link: Link, streams: list[list[Append]], tails: dict[bytes, Tail], timeout_s: float
    ) -> None:
        missing: list[tuple[list[Append], Entry | None]] = []
        overtaken: list[list[Append]] = []
        for writes, place in zip(streams, await self._look(link, streams, timeout_s), strict=True):
            newest = writes[-1].entry
            if place is None or place.is_removed(writes):
                self.gaps.pop(writes[0].key, None)
                continue
            if self._has_gap(writes, place.last):
                continue
            if place.ours == newest:
                if place.last == newest:
                    tails[writes[-1].key] = (newest.last_sequence, newest.digest)
            elif place.first is None or place.first.expected_sequence < newest.last_sequence:
                if after := _missing(writes, place.last):
                    missing.append((after, place.last))
                    self._found.setdefault(after[0].key, _loss(after, restored=True))
                else:
                    overtaken.append(writes)
        if missing:
            overtaken += await self._append_again(link, missing, tails, timeout_s)
        for writes in overtaken:
            if gone := await self._not_there(link, writes, timeout_s):
                self._found[writes[0].key] = _loss(gone, restored=False)
        self._held.forget({writes[0].key for writes in overtaken})

    def _has_gap(self, writes: list[Append], last: Entry | None) -> bool:
        """Whether something before the writes is missing that may still come."""
        key, now = writes[0].key, time.monotonic()
        end = 0 if last is None else last.last_sequence
        if writes[0].entry.expected_sequence > end and now < (until := self.gaps.setdefault(key, now + GAP_S)):
            self._held.kept_until = max(self._held.kept_until, until + _LATE_S)
            return True
        self.gaps.pop(key, None)
        return False

    async def _look(self, link: Link, streams: list[list[Append]], timeout_s: float) -> list[_Place | None]:
        """What the server has of each stream; None where it cannot say (it moves elsewhere, or is not ours)."""
        packed: list[bytes] = []
        for writes in streams:
            newest = writes[-1]
            identifier = entry_id(newest.entry)
            packed += (
                pack((b"XRANGE", newest.key, b"-", b"+", b"COUNT", b"1")),
                pack((b"XREVRANGE", newest.key, b"+", b"-", b"COUNT", b"1")),
                pack((b"XRANGE", newest.key, identifier, identifier)),
                pack((b"GET", self._keys.removed(newest.stream))),
            )
        replies = await link.exchange(packed, len(packed), timeout_s)
        return [
            self._place(writes[-1].stream, replies[at : at + 4])
            for writes, at in zip(streams, range(0, len(replies), 4), strict=True)
        ]

    def _place(self, stream: StreamId, replies: Sequence[Reply]) -> _Place | None:
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                if str(reply).startswith(ASK):
                    return None
                raise self._error(reply)
        try:
            first, last, ours = (stored_entry(stream, *reply[0]) if reply else None for reply in replies[:3])
        except CodecError:
            return None
        return _Place(first, last, ours, replies[3])

    async def _append_again(
        self,
        link: Link,
        missing: list[tuple[list[Append], Entry | None]],
        tails: dict[bytes, Tail],
        timeout_s: float,
    ) -> list[list[Append]]:
        """Append what is missing after each last entry; those streams that somebody else has gone on with meanwhile."""
        packed: list[bytes] = []
        for writes, last in missing:
            keys = (writes[0].key, self._keys.names(self._shard), self._keys.control(self._shard))
            arguments = [str(writes[0].stream).encode(), *((b"", b"") if last is None else (entry_id(last), last.body))]
            for write in writes:
                arguments += (entry_id(write.entry), write.entry.body, (write.notice_tag or "").encode())
            packed.append(pack((b"EVAL", _APPEND_AGAIN, b"3", *keys, *arguments)))
        self._unconfirmed = True
        overtaken: list[list[Append]] = []
        for (writes, _), reply in zip(missing, await link.exchange(packed, len(packed), timeout_s), strict=True):
            newest = writes[-1]
            if isinstance(reply, hiredis.ReplyError):
                raise self._error(reply)
            if reply == 1:
                tails[newest.key] = (newest.entry.last_sequence, newest.entry.digest)
            else:
                overtaken.append(writes)
        return overtaken

    async def _not_there(self, link: Link, writes: list[Append], timeout_s: float) -> list[Append]:
        """Those of a stream's held writes that it does not have any more."""
        packed = [pack((b"XRANGE", write.key, entry_id(write.entry), entry_id(write.entry))) for write in writes]
        gone: list[Append] = []
        for write, reply in zip(writes, await link.exchange(packed, len(packed), timeout_s), strict=True):
            if isinstance(reply, hiredis.ReplyError):
                raise self._error(reply)
            if not (reply and stored_entry(write.stream, *reply[0]) == write.entry):
                gone.append(write)
        return gone

    def _error(self, reply: hiredis.ReplyError) -> Exception:
        error = judged_error(self._address, reply)
        return Again(str(reply)) if isinstance(error, Refused) else error

    async def _report(self, link: Link, timeout_s: float) -> None:
        """To the shard's stream of losses and to the log, each once."""
        packed: list[bytes] = []
        for loss in self._found.values():
            fields = [part for name, value in loss._asdict().items() for part in (name, str(value))]
            key = self._keys.losses(self._shard)
            packed.append(pack((b"XADD", key, b"MAXLEN", b"~", _LOSSES_MAXLEN, b"*", *fields)))
        for reply in await link.exchange(packed, len(packed), timeout_s):
            if isinstance(reply, hiredis.ReplyError):
                raise self._error(reply)
        for loss in self._found.values():
            log.warning("journal.events_lost", **(loss._asdict() | {"stream": str(loss.stream)}))
        self._found.clear()


def removal_mark(first: Entry) -> bytes:
    """What a removed stream leaves: its first entry's digest, or nothing when it was trimmed."""
    return b"" if first.expected_sequence else digest_of(first.body)


def read_loss(fields: list[bytes]) -> Loss:
    """A loss as the stream of losses has it."""
    named = {name.decode(): value.decode() for name, value in zip(fields[::2], fields[1::2], strict=True)}
    return Loss(
        StreamId.parse(named["stream"]),
        int(named["epoch"]),
        int(named["first_sequence"]),
        int(named["last_sequence"]),
        named["restored"] == "True",
        int(named["time_ns"]),
    )


def _missing(writes: list[Append], last: Entry | None) -> list[Append]:
    """The writes that the stream lacks and that continue its last entry; none when they do not."""
    end, digest = EMPTY if last is None else (last.last_sequence, b"")
    after = [write for write in writes if write.entry.last_sequence > end]
    if not after or after[0].entry.expected_sequence != end:
        return []
    if last is not None:
        try:
            digest = decode_entry(after[0].stream, last.epoch, last.last_sequence, last.body)[-1].digest
        except JournalError:
            return []
    fits = previous_digest_of(after[0].entry.body) == digest and (last is None or after[0].entry.epoch >= last.epoch)
    return after if fits else []


def _loss(writes: list[Append], restored: bool) -> Loss:
    first, last = writes[0].entry, writes[-1].entry
    return Loss(writes[0].stream, last.epoch, first.expected_sequence + 1, last.last_sequence, restored, time.time_ns())
