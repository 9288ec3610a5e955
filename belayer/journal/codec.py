"""Events to bytes and back, and the digest chain that ties each event to the one before it.

An entry is one append: a msgpack array of envelopes, at least one. An envelope is the msgpack array [event id, digest
of the previous event's envelope, wall-clock ns, event]. An event's digest is blake2b-128 over its encoded envelope,
so a hole, a swap or an edit anywhere breaks the chain from there on. Bytes that are not such an entry raise
CodecError; an event tag of a newer version raises UnknownEventError; nothing is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from belayer import __version__
from belayer.errors import CodecError, InputError, UnknownEventError
from belayer.ids import EVENT_ID_BYTES, StreamId
from belayer.journal.events import AnyEvent, EpochStarted, StoredEvent, TokensPacked
from belayer.journal.packing import unpacked

DIGEST_BYTES = 16
GENESIS = bytes(DIGEST_BYTES)
"""The 'digest of the previous event' of a stream's first event."""


class Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is stored of one event, around the event itself."""

    event_id: bytes
    previous_digest: bytes
    time_ns: int
    event: AnyEvent


class _StoredEnvelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An envelope as it is in the bytes: its event may be packed."""

    event_id: bytes
    previous_digest: bytes
    time_ns: int
    event: StoredEvent


class Entry(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One append as stored: events `last_sequence - count + 1` to `last_sequence` of epoch `epoch`."""

    epoch: int
    last_sequence: int
    count: int
    body: bytes
    digest: bytes = b""
    """Of the last event, when whoever made the entry had it at hand; it follows from the body."""
    previous_digest: bytes = b""
    """Of the event before the first one, likewise."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entry) and (self.epoch, self.last_sequence, self.body) == (
            other.epoch,
            other.last_sequence,
            other.body,
        )

    def __ne__(self, other: object) -> bool:
        return not self == other  # a Struct's own compares identities

    def __hash__(self) -> int:
        return hash((self.epoch, self.last_sequence, self.body))

    @property
    def expected_sequence(self) -> int:
        """The sequence that the writer believed to be the stream's last one."""
        return self.last_sequence - self.count


class Recorded(NamedTuple):
    """One event as read back: where it stands, what ties it to its neighbours, and the event."""

    stream: StreamId
    epoch: int
    sequence: int
    event_id: bytes
    time_ns: int
    previous_digest: bytes
    digest: bytes
    event: AnyEvent


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_StoredEnvelope)
_event_decoder = msgspec.msgpack.Decoder(AnyEvent)
_ARRAY_OF_ONE = b"\x91"
_split = msgspec.msgpack.Decoder(list[msgspec.Raw])
UNDECODABLE = (msgspec.DecodeError, RecursionError)
"""What msgspec raises for bytes that somebody else wrote: arrays may be nested deeper than it follows."""

UPCASTERS: dict[str, Callable[[list[Any]], list[Any]]] = {}
"""Old tag -> the event's fields, tag first, in the form of the tag that came after it. Never a way back to an old tag.
Empty until a tag changes incompatibly."""


def digest_of(envelope: bytes | memoryview) -> bytes:
    """blake2b-128 of an encoded envelope."""
    return blake2b(envelope, digest_size=DIGEST_BYTES).digest()


def encode_entry(
    epoch: int,
    after_sequence: int,
    previous_digest: bytes,
    events: Sequence[StoredEvent],
    event_ids: Iterable[bytes],
    time_ns: int,
) -> tuple[Entry, bytes]:
    """The entry for events after `after_sequence`, and the digest of the last of them."""
    digest = previous_digest
    envelopes: list[bytes] = []
    for event_id, event in zip(event_ids, events, strict=True):
        encoded = _encoder.encode(_StoredEnvelope(event_id, digest, time_ns, event))
        digest = digest_of(encoded)
        envelopes.append(encoded)
    count = len(envelopes)
    body = _array_header(count) + b"".join(envelopes)
    return Entry(epoch, after_sequence + count, count, body, digest, previous_digest), digest


def encode_event(
    epoch: int, after_sequence: int, previous_digest: bytes, event: StoredEvent, event_id: bytes, time_ns: int
) -> Entry:
    """What `encode_entry` makes of one event, in less time: nearly all appends have one."""
    encoded = _encoder.encode(_StoredEnvelope(event_id, previous_digest, time_ns, event))
    digest = blake2b(encoded, digest_size=DIGEST_BYTES).digest()
    return Entry(epoch, after_sequence + 1, 1, _ARRAY_OF_ONE + encoded, digest, previous_digest)


def check_types(event: AnyEvent) -> None:
    """InputError when a field's value is not of its type: stored all the same, it would make the stream unreadable."""
    tag = event.__struct_config__.tag
    try:
        _event_decoder.decode(_encoder.encode(event))
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at ")
        field = event.__struct_fields__[int(place[3:].partition("]")[0]) - 1]
        raise InputError(f"{tag}: {field} is not usable: {problem}".replace("`", "")) from None
    except (TypeError, OverflowError) as error:
        raise InputError(f"{tag}: a value is not usable: {error}; give plain int, float, str and bytes") from None


def split_entry(stream: StreamId, epoch: int, last_sequence: int, body: bytes) -> list[msgspec.Raw]:
    """The encoded envelopes of a stored entry, in order."""
    try:
        envelopes = _split.decode(body)
    except UNDECODABLE as error:
        raise CodecError(f"{stream} entry {epoch}-{last_sequence}", f"not an entry: {error}") from None
    if not envelopes or len(envelopes) > last_sequence:
        raise CodecError(f"{stream} entry {epoch}-{last_sequence}", f"holds {len(envelopes)} events")
    return envelopes


def decode_entry(stream: StreamId, epoch: int, last_sequence: int, body: bytes) -> list[Recorded]:
    """The events of a stored entry, in order. The chain between them is for the reader to check."""
    envelopes = split_entry(stream, epoch, last_sequence, body)
    first = last_sequence - len(envelopes) + 1
    recorded: list[Recorded] = []
    for sequence, raw in enumerate(envelopes, first):
        encoded = memoryview(raw)
        where = f"{stream} at sequence {sequence}"
        try:
            envelope = _decode_envelope(where, encoded)
        except UnknownEventError as error:
            started = next((each.event for each in recorded if isinstance(each.event, EpochStarted)), None)
            raise error.by(started.belayer_version if started is not None else "") from None
        event = envelope.event
        recorded.append(
            Recorded(
                stream,
                epoch,
                sequence,
                envelope.event_id,
                envelope.time_ns,
                envelope.previous_digest,
                digest_of(encoded),
                unpacked(where, event) if isinstance(event, TokensPacked) else event,
            )
        )
    return recorded


def _decode_envelope(where: str, encoded: memoryview) -> _StoredEnvelope:
    try:
        try:
            return _decoder.decode(encoded)
        except msgspec.ValidationError as error:
            problem, found = str(error), msgspec.msgpack.decode(encoded)
    except UNDECODABLE as error:  # not even msgpack, perhaps only behind what is no event
        raise CodecError(where, f"not an event: {error}") from None
    match found:
        case [event_id, previous_digest, time_ns, [str() as tag, *_] as stored]:
            event = _upcast(list(stored))
        case _:
            raise CodecError(where, f"not an event: {problem}")
    if (unknown := _unknown_tag(event)) is not None:
        raise UnknownEventError(where, unknown, __version__)
    if event == stored:
        raise CodecError(where, f"not an event: {problem}")
    try:
        return msgspec.convert([event_id, previous_digest, time_ns, event], _StoredEnvelope)
    except msgspec.ValidationError as error:
        raise CodecError(where, f"an old {tag!r} event that cannot be read: {error}") from None


def _upcast(event: list[Any]) -> list[Any]:
    """The event in its current form: an old tag may become another old one first; the inside of a sealed one too."""
    while (upcaster := UPCASTERS.get(event[0])) is not None:
        event = upcaster(event)
    match event:
        case ["sealed", key, nonce, sealed, [str(), *_] as inner, *rest]:
            return ["sealed", key, nonce, sealed, _upcast(list(inner)), *rest]
        case _:
            return event


def _unknown_tag(event: list[Any]) -> str | None:
    """A tag in the event that this version does not know."""
    match event:
        case ["sealed", _, _, _, [str() as tag, *_], *_] if tag not in KNOWN_TAGS:
            return tag
        case [str() as tag, *_] if tag not in KNOWN_TAGS:
            return tag
        case _:
            return None


def is_newer(version: str) -> bool:
    """Whether that Belayer may write what this one does not know."""
    return _numbers(version) > _numbers(__version__) or (
        _numbers(version) == _numbers(__version__) and version != __version__
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def count_of(where: str, body: bytes) -> int:
    """How many events a stored entry holds, from its header alone."""
    first = body[:1]
    if first and 0x90 < first[0] <= 0x9F:
        return first[0] & 0x0F
    if first == b"\xdc" and len(body) > 2:
        return int.from_bytes(body[1:3], "big")
    if first == b"\xdd" and len(body) > 4:
        return int.from_bytes(body[1:5], "big")
    raise CodecError(where, "not an entry: no array of events")


def previous_digest_of(body: bytes) -> bytes:
    """The digest of the event before a stored entry, from its fixed place; for entries that we encoded ourselves."""
    header = 1 if body[0] < 0xDC else 3 if body[0] == 0xDC else 5
    start = header + 1 + 2 + EVENT_ID_BYTES + 2
    return body[start : start + DIGEST_BYTES]


def _array_header(length: int) -> bytes:
    """msgpack's header of an array of `length` items (its specification, 'array format family')."""
    if length < 16:
        return bytes([0x90 | length])
    if length < 1 << 16:
        return b"\xdc" + length.to_bytes(2, "big")
    return b"\xdd" + length.to_bytes(4, "big")


def _tags() -> frozenset[str]:
    return frozenset(str(member.__struct_config__.tag) for member in StoredEvent.__args__)


KNOWN_TAGS = _tags()
