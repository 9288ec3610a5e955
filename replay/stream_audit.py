"""Audits one stream in one pass: the chain of its entries, then what its kind's rules say of each event.

Nearly all of a journal are token chunks that continue where the last one ended, so those take a short way through this
file: decode, link, digest, offset. Everything else, and whatever is wrong, goes through the codec and the rules.
Memory: the state of this stream, and nothing that grows with tokens.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import msgspec

from belayer.errors import CodecError, UnknownEventError, WrongKeyError
from belayer.ids import StreamId, StreamKind
from belayer.journal.codec import DIGEST_BYTES, UNDECODABLE, Entry, Envelope, Recorded, decode_entry, is_newer
from belayer.journal.columns import LOGPROB_BYTES, TOKEN_ID_BYTES
from belayer.journal.events import AnyEvent, Sealed, TokensAppended
from belayer.journal.sealing import Keyring
from replay.chain import Chain
from replay.facts import Facts
from replay.findings import Check, Finding, Findings
from replay.run_audit import RunAudit
from replay.sandbox_audit import SandboxAudit
from replay.trajectory_audit import TrajectoryAudit
from replay.worker_audit import WorkerAudit

_decoder = msgspec.msgpack.Decoder(Envelope)
_ONE_EVENT = 0x91
"""An entry of one envelope begins with this byte (msgpack's array of one item)."""


class StreamResult(msgspec.Struct, frozen=True):
    """What the audit of one stream leaves behind."""

    stream: StreamId
    findings: list[Finding]
    facts: Facts
    events: int
    entries: int
    sealed: Counter[str]
    """Payloads that were not opened, by key."""


class StreamAudit:
    """Takes the entries of one stream in, in order; any number of calls."""

    def __init__(self, stream: StreamId, keyring: Keyring | None = None) -> None:
        self.stream = stream
        self._keyring = keyring
        self._sealed: Counter[str] = Counter()
        self.findings = Findings(str(stream))
        self._chain = Chain(self.findings)
        self._kind = _kind_audit(stream, self.findings)
        self._events = 0
        self._entries = 0

    def feed(self, entries: Iterable[tuple[StreamId, Entry]]) -> None:
        """Take entries of this stream in. UnknownEventError for an event of a newer version: nobody can judge it."""
        if isinstance(self._kind, TrajectoryAudit):
            self._feed_trajectory(self._kind, entries)
        else:
            for _, entry in entries:
                self._take(entry)

    def unreadable(self, problem: str) -> None:
        """What comes next is no entry, so nobody knows where the one after it begins."""
        self._chain.unreadable(self._chain.sequence + 1, problem)

    def close(self) -> StreamResult:
        """The stream has ended."""
        kind, whole = self._kind, self._chain.whole
        match kind:
            case TrajectoryAudit():
                facts: Facts = kind.facts(self._chain.sequence, whole)
            case SandboxAudit() | WorkerAudit() | RunAudit():
                facts = kind.facts(whole)
        return StreamResult(self.stream, self.findings.found, facts, self._events, self._entries, self._sealed)

    def _feed_trajectory(self, kind: TrajectoryAudit, entries: Iterable[tuple[StreamId, Entry]]) -> None:
        chain, decode, blake2b = self._chain, _decoder.decode, hashlib.blake2b
        epoch, sequence, digest = chain.epoch, chain.sequence, chain.digest
        generation, offset = kind.generation, kind.offset
        short = 0
        for _, entry in entries:
            body = entry.body
            encoded = body[1:]
            try:
                envelope = decode(encoded) if body[0] == _ONE_EVENT else None
            except UNDECODABLE:
                envelope = None
            if envelope is not None:
                chunk = envelope.event
                if (
                    type(chunk) is TokensAppended
                    and chunk.generation == generation
                    and chunk.offset == offset
                    and envelope.previous_digest == digest
                    and entry.last_sequence == sequence + 1
                    and entry.epoch == epoch
                    and len(chunk.token_ids) == (count := chunk.count) * TOKEN_ID_BYTES
                    and len(chunk.logprobs) == count * LOGPROB_BYTES
                    and len(chunk.loss_mask) == count
                    and count > 0
                ):
                    digest = blake2b(encoded, digest_size=DIGEST_BYTES).digest()
                    sequence += 1
                    offset += count
                    short += 1
                    continue
            chain.sequence, chain.digest, kind.offset = sequence, digest, offset
            if envelope is None:
                self._take(entry)
            else:
                self._take_one(entry, envelope, blake2b(encoded, digest_size=DIGEST_BYTES).digest())
            epoch, sequence, digest = chain.epoch, chain.sequence, chain.digest
            generation, offset = kind.generation, kind.offset
        chain.sequence, chain.digest, kind.offset = sequence, digest, offset
        self._events += short
        self._entries += short

    def _take_one(self, entry: Entry, envelope: Envelope, digest: bytes) -> None:
        """An entry of one event, decoded already."""
        self._entries += 1
        self._events += 1
        recorded = Recorded(
            self.stream,
            entry.epoch,
            entry.last_sequence,
            envelope.event_id,
            envelope.time_ns,
            envelope.previous_digest,
            digest,
            envelope.event,
        )
        self._step(recorded)

    def _take(self, entry: Entry) -> None:
        """Any entry, through the codec: several events, old tags, or bytes that are none."""
        self._entries += 1
        try:
            events = decode_entry(self.stream, entry.epoch, entry.last_sequence, entry.body)
        except UnknownEventError as error:
            version = self._chain.writer_version if entry.epoch == self._chain.epoch else ""
            if not version or is_newer(version):
                raise error.by(version) from None
            problem = f"event tag {error.tag!r}, which Belayer {version} never wrote"
            self._chain.unreadable(entry.last_sequence, problem)
            return
        except CodecError as error:
            self._chain.unreadable(entry.last_sequence, error.problem)
            return
        self._events += len(events)
        for recorded in events:
            self._step(recorded)

    def _step(self, recorded: Recorded) -> None:
        if self._chain.accept(recorded):
            self._kind.step(recorded.sequence, self._opened(recorded), self._chain.whole)

    def _opened(self, recorded: Recorded) -> AnyEvent:
        """The event with its payload, if it is sealed and its key is here; the chain is over the bytes as they are."""
        event = recorded.event
        if not isinstance(event, Sealed):
            return event
        if self._keyring is None or event.key not in self._keyring:
            self._sealed[event.key] += 1
            return event
        try:
            return self._keyring.open(recorded).event
        except WrongKeyError:
            problem = f"key {event.key!r} does not open the payload: it was sealed with another key of this name"
        except CodecError as error:
            problem = error.problem
        self.findings.add(recorded.sequence, Check.SEALED, problem)
        return event


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
