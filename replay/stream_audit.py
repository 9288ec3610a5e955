"""Audits one stream in one pass: the chain of its entries, then what its kind's rules say of each event.

Nearly all of a journal are token chunks that continue where the last one ended, so those take a short way through this
file: decode, link, digest, offset. Everything else, and whatever is wrong, goes through the codec and the rules.
Memory: the state of this stream, and nothing that grows with tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from belayer.errors import CodecError, UnknownEventError
from belayer.ids import StreamId, StreamKind
from belayer.journal.codec import DIGEST_BYTES, Entry, Envelope, decode_entry
from belayer.journal.columns import LOGPROB_BYTES, TOKEN_ID_BYTES
from belayer.journal.events import TokensAppended
from replay.chain import Chain
from replay.facts import Facts
from replay.findings import Finding, Findings
from replay.run_audit import RunAudit
from replay.sandbox_audit import SandboxAudit
from replay.trajectory_audit import TrajectoryAudit
from replay.worker_audit import WorkerAudit

_ONE_EVENT = 0x91
"""An entry of one envelope begins with this byte (msgpack's array of one item)."""


class StreamResult(msgspec.Struct, frozen=True):
    """What the audit of one stream leaves behind."""

    stream: StreamId
    findings: list[Finding]
    facts: Facts
    events: int
    entries: int


class StreamAudit:
    """Takes the entries of one stream in, in order; any number of calls."""

    def __init__(self, stream: StreamId) -> None:
        self.stream = stream
        self.findings = Findings(str(stream))
        self._chain = Chain(self.findings)
        self._kind = _kind_audit(stream, self.findings)
        self._events = 0
        self._entries = 0

    def feed(self, entries: Iterable[Entry]) -> None:
        """Take entries in. UnknownEventError for an event of a newer version: nothing can be said about those."""
        if isinstance(self._kind, TrajectoryAudit):
            self._feed_trajectory(self._kind, entries)
        else:
            for entry in entries:
                self._take(entry)

    def close(self) -> StreamResult:
        """The stream has ended."""
        kind, whole = self._kind, self._chain.whole
        match kind:
            case TrajectoryAudit():
                facts: Facts = kind.facts(self._chain.sequence, whole)
            case SandboxAudit() | WorkerAudit() | RunAudit():
                facts = kind.facts(whole)
        return StreamResult(self.stream, self.findings.found, facts, self._events, self._entries)

    def _feed_trajectory(self, kind: TrajectoryAudit, entries: Iterable[Entry]) -> None:
        chain = self._chain
        decode = msgspec.msgpack.Decoder(Envelope).decode
        blake2b = hashlib.blake2b
        for entry in entries:
            body = entry.body
            if entry.epoch == chain.epoch and entry.last_sequence == chain.sequence + 1 and body[0] == _ONE_EVENT:
                encoded = memoryview(body)[1:]
                try:
                    envelope = decode(encoded)
                except msgspec.DecodeError:
                    self._take(entry)
                    continue
                chunk = envelope.event
                if type(chunk) is TokensAppended and envelope.previous_digest == chain.digest:
                    count = chunk.count
                    if (
                        chunk.generation == kind.generation
                        and chunk.offset == kind.offset
                        and len(chunk.token_ids) == count * TOKEN_ID_BYTES
                        and len(chunk.logprobs) == count * LOGPROB_BYTES
                        and len(chunk.loss_mask) == count > 0
                    ):
                        chain.digest = blake2b(encoded, digest_size=DIGEST_BYTES).digest()
                        chain.sequence = entry.last_sequence
                        kind.offset += count
                        self._events += 1
                        self._entries += 1
                        continue
            self._take(entry)

    def _take(self, entry: Entry) -> None:
        self._entries += 1
        try:
            events = decode_entry(self.stream, entry.epoch, entry.last_sequence, entry.body)
        except UnknownEventError:
            raise
        except CodecError as error:
            self._chain.unreadable(entry.last_sequence, error.problem)
            return
        self._events += len(events)
        for recorded in events:
            if self._chain.accept(recorded):
                self._kind.step(recorded.sequence, recorded.event, self._chain.whole)


def _kind_audit(stream: StreamId, findings: Findings) -> TrajectoryAudit | SandboxAudit | WorkerAudit | RunAudit:
    match stream.kind:
        case StreamKind.TRAJECTORY:
            return TrajectoryAudit(findings)
        case StreamKind.SANDBOX:
            return SandboxAudit(findings)
        case StreamKind.WORKER:
            return WorkerAudit(findings)
        case StreamKind.RUN:
            return RunAudit(findings)
