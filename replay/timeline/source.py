"""Gets a trajectory's story out of an exported file, or out of entries that the caller has read."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from msgspec.structs import replace

from belayer import ids
from belayer.errors import UnknownEventError, UnknownStreamError
from belayer.ids import StreamId, StreamKind
from belayer.journal.codec import Entry, Recorded, decode_entry
from belayer.journal.events import EpochStarted, GenerationResumed, GenerationStarted, Sealed, TokensAppended
from belayer.journal.export import read_export
from belayer.journal.sealing import Keyring
from replay.audit import audit
from replay.timeline.build import build
from replay.timeline.model import Story


def from_file(path: Path, name: str, keyring: Keyring | None = None) -> Story:
    """The story of that trajectory. UnknownStreamError, with what the file has, when it is not there."""
    there: list[str] = []

    def wanted(stream: StreamId) -> bool:
        if stream.kind is StreamKind.TRAJECTORY:
            there.append(stream.name)
        return tells_of(stream, name)

    entries = list(read_export(path, wanted))
    trajectory = ids.trajectory(name)
    if all(stream != trajectory for stream, _ in entries):
        near = ids.nearest(name, there)
        some = ", ".join(sorted(there)[:5]) + (f" and {len(there) - 5} more" if len(there) > 5 else "")
        has = f"{len(there)} trajectories" if near else some or "no trajectories"
        raise UnknownStreamError(str(trajectory), f"{path} has {has}", near)
    return from_entries(entries, name, keyring)


def tells_of(stream: StreamId, name: str) -> bool:
    """Whether the stream says something about the trajectory: its own, its sandbox's, any worker's and run's."""
    return stream.kind in (StreamKind.WORKER, StreamKind.RUN) or stream.name == name


def from_entries(entries: list[tuple[StreamId, Entry]], name: str, keyring: Keyring | None = None) -> Story:
    """The story that these entries tell; those of one stream stand together. Payloads whose key is not here are empty.

    WrongKeyError for one that does not open with the key of its name.
    """
    sealed: set[str] = set()
    streams = {stream: _events(group, keyring, sealed) for stream, group in groupby(entries, key=itemgetter(0))}
    used = _engines(streams.get(ids.trajectory(name), []))
    relevant = {
        stream: events
        for stream, events in streams.items()
        if stream.kind is not StreamKind.WORKER or stream.name in used
    }
    story = build(name, relevant)
    story.sealed_with = sorted(sealed)
    story.findings = len(audit((stream, entry) for stream, entry in entries if stream in relevant).findings)
    return story


def _events(group: Iterable[tuple[StreamId, Entry]], keyring: Keyring | None, sealed: set[str]) -> list[Recorded]:
    found: list[Recorded] = []
    began: dict[int, str] = {}
    for stream, entry in group:
        try:
            events = decode_entry(stream, entry.epoch, entry.last_sequence, entry.body)
        except UnknownEventError as error:
            raise error.by(began.get(entry.epoch, "")) from None
        began |= {each.epoch: each.event.belayer_version for each in events if isinstance(each.event, EpochStarted)}
        found += [_without_tokens(_opened(recorded, keyring, sealed)) for recorded in events]
    return found


def _opened(recorded: Recorded, keyring: Keyring | None, sealed: set[str]) -> Recorded:
    """The event with its payload, or what can be read of it without the key, which is added to `sealed`."""
    event = recorded.event
    if not isinstance(event, Sealed):
        return recorded
    if keyring is not None and event.key in keyring:
        return keyring.open(recorded)
    sealed.add(event.key)
    return recorded._replace(event=event.event)


def _without_tokens(recorded: Recorded) -> Recorded:
    event = recorded.event
    if not isinstance(event, TokensAppended):
        return recorded
    return recorded._replace(event=replace(event, token_ids=b"", logprobs=b"", loss_mask=b""))


def _engines(trajectory: list[Recorded]) -> set[str]:
    """The workers that served the trajectory."""
    events = (recorded.event for recorded in trajectory)
    return {event.worker for event in events if isinstance(event, GenerationStarted | GenerationResumed)}
