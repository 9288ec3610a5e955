"""The two writes of the journal as Redis commands, and what their replies mean.

An append is one XADD whose id fences by itself. It does not create a stream that the store knows to exist (NOMKSTREAM),
so a stream that was removed or lost is noticed and never grows again from its middle. A takeover is a script because
it must compare what it saw with what is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import hiredis
import msgspec

from belayer.errors import JournalError, WrongSequenceError
from belayer.ids import StreamId
from belayer.journal.codec import GENESIS, Entry, previous_digest_of
from belayer.journal.keys import BODY_FIELD, NOTICE_STREAM_FIELD, NOTICE_TAG_FIELD, Keys, entry_id, stored_entry
from belayer.journal.link import Reply, pack
from belayer.journal.outcome import takeover_refusal
from belayer.journal.replies import Refused, judged_error

CONTROL_MAXLEN = b"4000000"
"""Notices kept on a control stream, roughly. A notice takes 76 bytes, so this is at most 300 MB. A rollout of 4,096
trajectories with 100 actions each makes 800,000, so a watch that stays pending outlives five of them before it could
be dropped; what is dropped is lost to a group that had it pending, so the number is rather too high than too low."""

TAKE_OVER = b"""
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if last then
  if last[1] == ARGV[1] and last[2][2] == ARGV[2] then return 1 end
  if last[1] ~= ARGV[4] or last[2][2] ~= ARGV[5] then return last end
elseif ARGV[4] ~= '' then
  return 0
end
redis.call('XADD', KEYS[1], ARGV[1], 'e', ARGV[2])
redis.call('SADD', KEYS[2], ARGV[3])
return 1
"""
"""KEYS: stream, names. ARGV: id, body, the stream's name, then id and body of the entry seen last ('' for none).
Returns 1 when stored (now or by an earlier try), 0 when the stream is gone, else the entry that is last."""

TRIM = b"""
local first = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if not first or first[2][2] ~= ARGV[2] then return 0 end
if redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1][1] == ARGV[1] then return 1 end
redis.call('UNLINK', KEYS[2])
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], ARGV[1], '+')) do
  redis.call('XADD', KEYS[2], entry[1], 'e', entry[2][2])
end
redis.call('RESTORE', KEYS[1], '0', redis.call('DUMP', KEYS[2]), 'REPLACE')
redis.call('UNLINK', KEYS[2])
return 1
"""
"""KEYS: stream, a key for the time of the script. ARGV: id and body of the first entry that stays. The stream is never
away: it is replaced by one that ends with the same id, and so fences as before. XTRIM would do that too, but leaves the
nodes half empty: 2.5 KB for the entry that stays, which so takes 0.5 KB with its key."""

_MULTI = pack((b"MULTI",))
_EXEC = pack((b"EXEC",))
_XADD = b"*6\r\n$4\r\nXADD\r\n$%d\r\n%b\r\n$10\r\nNOMKSTREAM\r\n$%d\r\n%b\r\n$1\r\ne\r\n$%d\r\n"

Tail = tuple[int, bytes]
"""Sequence and digest of a stream's last event; the digest is empty when it is not at hand."""
EMPTY: Tail = (0, GENESIS)


class Append(msgspec.Struct, eq=False, gc=False):
    """An entry on its way; `done` comes true once it is stored. A struct because it is made in half the time."""

    stream: StreamId
    key: bytes
    entry: Entry
    size_bytes: int
    started: float
    done: asyncio.Future[Entry | None]
    notice_tag: str | None = None
    replies: int = 1
    """How many its packed commands have."""

    def settle(self, outcome: Entry | JournalError | None) -> None:
        """The outcome: stored (None), the entry that a takeover met, or an error. The first one counts."""
        if self.done.done():
            return
        if isinstance(outcome, JournalError):
            self.done.set_exception(outcome)
        else:
            self.done.set_result(outcome)

    def follows(self, tail: Tail | None) -> bool:
        """Whether the entry comes right after the stream's last event, as far as that is known."""
        entry = self.entry
        if tail is None or tail[0] != entry.last_sequence - entry.count:
            return False
        return not tail[1] or tail[1] == (entry.previous_digest or previous_digest_of(entry.body))

    def pack(self, packed: list[bytes], keys: Keys, shard: int, is_new: bool) -> None:
        """Add the packed commands. `is_new`: the stream is known to be empty."""
        if not is_new and self.notice_tag is None:
            self._pack_add(packed)
            self.replies = 1
            return
        if is_new:
            packed.append(_MULTI)
            packed.append(pack((b"XADD", self.key, entry_id(self.entry), BODY_FIELD, self.entry.body)))
            packed.append(pack((b"SADD", keys.names(shard), str(self.stream))))
            self.replies = 3
        else:
            packed.append(_MULTI)
            self._pack_add(packed)
            self.replies = 2
        if self.notice_tag is not None:
            notice = (NOTICE_STREAM_FIELD, str(self.stream), NOTICE_TAG_FIELD, self.notice_tag)
            packed.append(pack((b"XADD", keys.control(shard), b"MAXLEN", b"~", CONTROL_MAXLEN, b"*", *notice)))
            self.replies += 1
        packed.append(_EXEC)
        self.replies += 1

    def _pack_add(self, packed: list[bytes]) -> None:
        """`XADD key NOMKSTREAM id e body`, by hand: the body is then copied once, when all is joined."""
        key, body, identifier = self.key, self.entry.body, entry_id(self.entry)
        packed += (_XADD % (len(key), key, len(identifier), identifier, len(body)), body, b"\r\n")

    def judge(self, address: str, replies: Sequence[Reply], at: int, end: int) -> bool:
        """From the replies `at` to `end`: True when the entry is stored; Again, Refused or a JournalError when not."""
        reply = replies[end - 1]
        if type(reply) is bytes:
            return True
        if isinstance(reply, list):
            reply = reply[0]  # pyright: ignore[reportUnknownVariableType]
        if isinstance(reply, hiredis.ReplyError):
            queued = (reply for reply in replies[at:end] if isinstance(reply, hiredis.ReplyError))
            raise judged_error(address, next(queued, reply))
        if reply is None:
            raise Refused
        return True


class TakeOver(Append, eq=False, kw_only=True, gc=False):
    """An EpochStarted on its way, to be stored only right after the entry `after`."""

    after: Entry | None

    def follows(self, tail: Tail | None) -> bool:
        """The script looks for itself."""
        return True

    def pack(self, packed: list[bytes], keys: Keys, shard: int, is_new: bool) -> None:
        after = (b"", b"") if self.after is None else (entry_id(self.after), self.after.body)
        arguments = (entry_id(self.entry), self.entry.body, str(self.stream), *after)
        packed.append(pack((b"EVAL", TAKE_OVER, b"2", self.key, keys.names(shard), *arguments)))

    def judge(self, address: str, replies: Sequence[Reply], at: int, end: int) -> bool:
        """True when stored; False when another entry is last, which is then the outcome. Again or a JournalError."""
        reply = replies[at]
        if isinstance(reply, hiredis.ReplyError):
            raise judged_error(address, reply)
        if reply == 1:
            return True
        if reply == 0:
            raise WrongSequenceError(str(self.stream), 0 if self.after is None else self.after.last_sequence, 0)
        last = stored_entry(self.stream, reply[0], reply[1])
        if error := takeover_refusal(self.stream, self.after, last):
            raise error
        self.settle(last)
        return False
