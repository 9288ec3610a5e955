"""`belayer tail`: a stream's events as they were written, the newest at the end. Reads, takes no epoch."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from belayer.cli.options import ArchiveUrl, Namespace, Url, find_stream, open_journal

if TYPE_CHECKING:
    from belayer.ids import StreamId
    from belayer.journal.codec import Entry
    from belayer.journal.sealing import Keyring

HELP = """Print the last events of a stream (kind/name, or a trajectory's bare name), and with --follow the new ones.

Examples:

  belayer tail django-11039 --follow

  belayer tail sandbox/django-11039 --lines 100

  belayer tail worker/w0 --json | jq .tag
"""

_PAGE = 500
_WAIT_S = 5.0


def tail(
    stream: Annotated[str, typer.Argument(help="kind/name, or the name of a trajectory.")],
    url: Url = None,
    namespace: Namespace = "default",
    archive: ArchiveUrl = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many events from the end.", min=0)] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new events until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, token columns included.")] = False,
) -> None:
    asyncio.run(_tail(stream, url, namespace, archive, lines, follow, as_json))


async def _tail(
    text: str, url: str | None, namespace: str, archive: str | None, lines: int, follow: bool, as_json: bool
) -> None:
    from belayer.errors import UnknownEventError
    from belayer.journal.writer import version_of

    async with open_journal(url, namespace, archive) as store:
        stream = await find_stream(store, text)
        last = await store.last(stream)
        shown = max(0, last.last_sequence - lines) if last is not None else 0
        while True:
            for entry in (entries := await store.read(stream, shown, _PAGE)):
                try:
                    _print(stream, entry, shown, as_json, store.keyring)
                except UnknownEventError as error:
                    raise error.by(await version_of(store, stream, entry.epoch)) from None
                shown = entry.last_sequence
            if len(entries) < _PAGE:
                if not follow:
                    return
                while not await store.wait(stream, shown, _WAIT_S):
                    pass


def _print(stream: StreamId, entry: Entry, after: int, as_json: bool, keyring: Keyring | None) -> None:
    """The entry's events after that sequence."""
    import json
    from datetime import datetime

    from belayer.journal.codec import decode_entry
    from replay.describe import as_data, in_words

    for recorded in decode_entry(stream, entry.epoch, entry.last_sequence, entry.body):
        if recorded.sequence <= after:
            continue
        if keyring is not None:
            recorded = keyring.open(recorded)
        if as_json:
            place = {
                "stream": str(stream),
                "epoch": recorded.epoch,
                "sequence": recorded.sequence,
                "time_ns": recorded.time_ns,
                "event_id": recorded.event_id.hex(),
            }
            line = json.dumps({**place, **as_data(recorded.event)})
        else:
            at = datetime.fromtimestamp(recorded.time_ns / 1e9).strftime("%H:%M:%S.%f")[:-3]
            line = f"{at}  {recorded.epoch:>3}-{recorded.sequence:<6} {in_words(recorded.event)}"
        sys.stdout.write(line + "\n")
    sys.stdout.flush()
