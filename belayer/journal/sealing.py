"""Payloads encrypted at rest: prompts, tokens, commands and observations, and nothing else of an event.

Sealed are the columns; what an event is about (numbers, offsets, counts, exit status) stays readable, so actors,
status, audit and archive need no key, and the digest chain covers the ciphertext. AES-256-GCM (NIST SP 800-38D) by the
package cryptography. Each stream has a key of its own, HKDF-SHA256 (RFC 5869) of the named key and the stream's name,
so that random 96-bit nonces stay far below their bound. The stream, the key's name and the event's place in the
trajectory are authenticated with the payload, so that none can stand for another; the rest is the digest chain's.

A keyring writes with its first key and reads with all: rotation is a new first line. A key that is not there is
MissingKeyError, one that does not fit WrongKeyError, both naming the key and where it is needed. Keys are never shown.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.structs import replace

from belayer.errors import CodecError, InputError, MissingKeyError, WrongKeyError
from belayer.ids import StreamId
from belayer.journal.codec import Recorded
from belayer.journal.events import (
    ActionCommitted,
    ActionStarted,
    AnyEvent,
    Sealed,
    TokensAppended,
    TrajectoryStarted,
)

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

VARIABLE = "BELAYER_ENCRYPTION_KEYS"
KEY_BYTES = 32
NONCE_BYTES = 12
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_INFO = b"belayer payload 1 "
_MOST_KEPT = 10_000
_FORM = "expected file:PATH or env:NAME, and there lines of a key's name and 32 bytes in base64"

Bearer = TrajectoryStarted | TokensAppended | ActionStarted | ActionCommitted
T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
_decode_chunk = msgspec.msgpack.Decoder(tuple[bytes, bytes, bytes]).decode
_decode_outcome = msgspec.msgpack.Decoder(tuple[bytes, bytes]).decode
_decode_bytes = msgspec.msgpack.Decoder(bytes).decode
_decode_text = msgspec.msgpack.Decoder(str).decode


class Keyring:
    """Named keys of 32 bytes; the first one is written with."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        if not keys:
            raise InputError(f"there is no encryption key; {_FORM}")
        for name, key in keys.items():
            if not _NAME.match(name) or len(key) != KEY_BYTES:
                raise InputError(f"encryption key {name!r} has {len(key)} bytes; {_FORM}")
        self._keys = dict(keys)
        self._current = next(iter(keys))
        self._ciphers: dict[tuple[str, StreamId], AESGCM] = {}
        self._derive = _derivation()

    @classmethod
    def load(cls, reference: str) -> Keyring:
        """The keys at `file:PATH` or `env:NAME`, one a line: a name and base64. InputError does not repeat them."""
        kind, _, place = reference.partition(":")
        match kind:
            case "file":
                try:
                    text = Path(place).read_text()
                except (OSError, UnicodeDecodeError) as error:
                    raise InputError(f"encryption keys: cannot read {place}: {error.__class__.__name__}") from None
            case "env":
                text = os.environ.get(place, "")
            case _:
                raise InputError(f"{kind!r} is no reference to encryption keys; {_FORM}")
        keys: dict[str, bytes] = {}
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            try:
                name, encoded = words
                key = base64.b64decode(encoded, validate=True)
            except (ValueError, binascii.Error):
                raise InputError(f"encryption keys in {reference}, line {number}: {_FORM}") from None
            if name in keys:
                raise InputError(f"encryption keys in {reference}, line {number}: {name!r} comes twice")
            keys[name] = key
        return cls(keys)

    @property
    def names(self) -> list[str]:
        """The keys' names, the one that is written with first."""
        return list(self._keys)

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def __repr__(self) -> str:
        return f"Keyring({', '.join(self._keys)})"

    def seal(self, stream: StreamId, event: AnyEvent) -> AnyEvent:
        """The event with its payload encrypted; one that has none as it is."""
        match event:
            case TokensAppended():
                payload = _encoder.encode((event.token_ids, event.logprobs, event.loss_mask))
                bare: Bearer = replace(event, token_ids=b"", logprobs=b"", loss_mask=b"")
            case TrajectoryStarted():
                payload, bare = _encoder.encode(event.prompt), replace(event, prompt=b"")
            case ActionStarted():
                payload, bare = _encoder.encode(event.command), replace(event, command="")
            case ActionCommitted():
                payload = _encoder.encode((event.observation, event.observation_digest))
                bare = replace(event, observation=b"", observation_digest=b"")
            case _:
                return event
        nonce = os.urandom(NONCE_BYTES)
        sealed = self._cipher(self._current, stream).encrypt(nonce, payload, _bound(stream, self._current, bare))
        return Sealed(self._current, nonce, sealed, bare)

    def open(self, recorded: Recorded) -> Recorded:
        """The event with its payload; one that is not sealed as it is. MissingKeyError, WrongKeyError."""
        sealed = recorded.event
        if not isinstance(sealed, Sealed):
            return recorded
        from cryptography.exceptions import InvalidTag

        where = f"{recorded.stream} at sequence {recorded.sequence}"
        if sealed.key not in self._keys:
            raise MissingKeyError(where, sealed.key, self.names)
        bound = _bound(recorded.stream, sealed.key, sealed.event)
        try:
            payload = self._cipher(sealed.key, recorded.stream).decrypt(sealed.nonce, sealed.sealed, bound)
        except (InvalidTag, ValueError):
            raise WrongKeyError(where, sealed.key) from None
        return recorded._replace(event=_with_payload(where, sealed.event, payload))

    def _cipher(self, name: str, stream: StreamId) -> AESGCM:
        cipher = self._ciphers.get((name, stream))
        if cipher is None:
            if len(self._ciphers) >= _MOST_KEPT:
                self._ciphers.clear()
            cipher = self._ciphers[name, stream] = self._derive(self._keys[name], _INFO + str(stream).encode())
        return cipher


def keyring_of(reference: str | None) -> Keyring | None:
    """The keyring that is named, by the reference or else by the environment; None when none is."""
    reference = reference or os.environ.get(VARIABLE)
    return Keyring.load(reference) if reference else None


def _derivation() -> Callable[[bytes, bytes], AESGCM]:
    """A stream's cipher from a key and the stream's name."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ModuleNotFoundError:
        raise InputError("encryption needs the package cryptography; pip install 'belayer[encryption]'") from None
    return lambda key, info: AESGCM(HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(key))


def _bound(stream: StreamId, key: str, bare: Bearer) -> bytes:
    """What is authenticated with the payload: its place. Part of the stored format, whatever fields are added."""
    match bare:
        case TokensAppended():
            place: tuple[str | int, ...] = ("tokens", bare.generation, bare.offset, bare.count, bare.weight_version)
        case TrajectoryStarted():
            place = ("start", bare.run, bare.task)
        case ActionStarted():
            place = ("action", bare.action)
        case ActionCommitted():
            place = ("outcome", bare.action, bare.exit_status)
    return _encoder.encode((str(stream), key, *place))


def _with_payload(where: str, bare: Bearer, payload: bytes) -> AnyEvent:
    match bare:
        case TokensAppended():
            token_ids, logprobs, loss_mask = _decoded(where, _decode_chunk, payload)
            return replace(bare, token_ids=token_ids, logprobs=logprobs, loss_mask=loss_mask)
        case TrajectoryStarted():
            return replace(bare, prompt=_decoded(where, _decode_bytes, payload))
        case ActionStarted():
            return replace(bare, command=_decoded(where, _decode_text, payload))
        case ActionCommitted():
            observation, digest = _decoded(where, _decode_outcome, payload)
            return replace(bare, observation=observation, observation_digest=digest)


def _decoded(where: str, decode: Callable[[bytes], T], payload: bytes) -> T:
    try:
        return decode(payload)
    except msgspec.DecodeError as error:
        raise CodecError(where, f"the sealed payload is not what Belayer writes: {error}") from None


def generate_key() -> str:
    """A new key in base64, for a line of a key file."""
    return base64.b64encode(os.urandom(KEY_BYTES)).decode()
