"""`belayer archive`: what is in the archive, move finished trajectories into it, check it, and let old ones go."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from belayer.cli.options import ArchiveUrl, AsJson, Namespace, Url, open_journal
from belayer.errors import CodecError, InputError

if TYPE_CHECKING:
    from belayer.journal.archive import Archive

HELP = """The archive of finished trajectories: compressed segments in a folder or an object store.

`belayer actors --archive URL` fills it; audit, export, timeline and tail read across server and archive with
--archive URL (or BELAYER_ARCHIVE_URL). docs/archive.md says what is kept where.

Examples:

  belayer archive run --url redis://journal:6379 --archive /data/archive

  belayer archive list --archive s3://bucket/belayer

  belayer archive verify --archive s3://bucket/belayer --url redis://journal:6379

  belayer archive prune --archive /data/archive --url redis://journal:6379 --older-than 30d --dry-run
"""

archive = typer.Typer(
    help=HELP, no_args_is_help=True, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]}
)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}


@archive.callback()
def _root(context: typer.Context) -> None:
    """Settings of belayer.toml count for every one of the verb's commands."""
    settings = dict(context.default_map or {})
    context.default_map = {name: settings for name in ("list", "run", "verify", "prune")}


@archive.command("list")
def list_segments(archive: ArchiveUrl = None, namespace: Namespace = "default", as_json: AsJson = False) -> None:
    """List the segments, oldest first."""
    from belayer.journal.archive_upkeep import rows

    found = asyncio.run(rows(_opened(archive, namespace)))
    if as_json:
        _print_json(found)
        return
    from rich.console import Console

    if not found:
        sys.stdout.write("There are no segments in this archive.\n")
        return
    from replay.rows import Rows

    table = Rows("segment", "written", ">size", ">of", ">streams", ">events")
    for row in found:
        size, raw = _megabytes(row.size_bytes), _megabytes(row.raw_bytes)
        table.add(row.segment, row.created, size, raw, str(row.streams), str(row.events))
    Console().print(table)


@archive.command("run")
def run(archive: ArchiveUrl = None, url: Url = None, namespace: Namespace = "default", as_json: AsJson = False) -> None:
    """Archive every trajectory that has ended and whose sandbox is removed, now. The actors do it by themselves."""
    archived, left = asyncio.run(_run(_opened(archive, namespace), url, namespace))
    if as_json:
        _print_json({"archived": archived, "left": left})
    else:
        sys.stdout.write(f"archived {len(archived)} trajectories; {len(left)} stay\n")
        sys.stdout.writelines(f"  {name}: {why}\n" for name, why in left.items())


async def _run(archive: Archive, url: str | None, namespace: str) -> tuple[list[str], dict[str, str]]:
    """What was archived, and why the others were not. Those archived before are neither."""
    import os

    from belayer.actors.archiver import Archiver
    from belayer.ids import StreamKind
    from belayer.journal.codec import decode_entry
    from belayer.journal.writer import mark_of

    async with open_journal(url, namespace) as store:
        names: list[str] = []
        for stream in await store.streams(StreamKind.TRAJECTORY):
            last = await store.last(stream)
            with contextlib.suppress(CodecError):  # the archiver will say what is wrong with it
                if last is None or mark_of(decode_entry(stream, last.epoch, last.last_sequence, last.body)):
                    continue
            names.append(stream.name)
        outcomes = await Archiver(store, archive, f"archive/{os.getpid()}").archive(names)
    left = {name: str(error) for name, error in outcomes.items() if error is not None}
    return sorted(outcomes.keys() - left.keys()), left


@archive.command("verify")
def verify(
    archive: ArchiveUrl = None, url: Url = None, namespace: Namespace = "default", as_json: AsJson = False
) -> None:
    """Read everything and check digests, sequences and chains; with --url also that what the server's marks name is
    there. Exit status 1 when something is wrong."""
    found = asyncio.run(_verify(_opened(archive, namespace), url, namespace))
    if as_json:
        _print_json(found)
    else:
        size, raw = _megabytes(found.size_bytes), _megabytes(found.raw_bytes)
        counts = f"{found.segments} segments, {found.streams} streams, {found.events} events, {size} (of {raw})"
        sys.stdout.write(f"{counts}: {len(found.problems)} problems\n")
        sys.stdout.writelines(f"  {problem}\n" for problem in found.problems)
        sys.stdout.writelines(f"  {name}: no mark names it; it only takes up space\n" for name in found.unnamed)
    raise typer.Exit(1 if found.problems else 0)


async def _verify(archive: Archive, url: str | None, namespace: str) -> Any:
    from belayer.journal.archive_upkeep import verify

    if not url:
        return await verify(archive)
    async with open_journal(url, namespace) as store:
        return await verify(archive, store)


@archive.command("prune")
def prune(
    archive: ArchiveUrl = None,
    url: Url = None,
    namespace: Namespace = "default",
    older_than: Annotated[str | None, typer.Option(help="Remove segments of a greater age: 30d, 12h, ...")] = None,
    larger_than: Annotated[str | None, typer.Option(help="Remove the oldest until no more is left: 500G, 2T.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old segments, and from the server the marks that name them. What is removed is gone for good."""
    if older_than is None and larger_than is None:
        raise InputError("nothing says what may go; give --older-than AGE, --larger-than SIZE or both")
    age = None if older_than is None else parse_age(older_than)
    size_bytes = None if larger_than is None else parse_size(larger_than)
    found = asyncio.run(_prune(_opened(archive, namespace), url, namespace, age, size_bytes, dry_run))
    if as_json:
        _print_json(found)
        return
    verb = "would remove" if dry_run else "removed"
    freed = _megabytes(sum(row.size_bytes for row in found.removed))
    left = _megabytes(found.left_bytes)
    sys.stdout.write(f"{verb} {len(found.removed)} segments ({freed}) of {found.streams} streams; {left} left\n")
    sys.stdout.writelines(f"  {name} stays: streams go on from it in a younger segment\n" for name in found.kept)


async def _prune(
    archive: Archive, url: str | None, namespace: str, age: timedelta | None, size_bytes: int | None, dry_run: bool
) -> Any:
    from belayer.journal.archive_upkeep import prune

    async with open_journal(url, namespace) as store:
        return await prune(archive, store, datetime.now(UTC), age, size_bytes, dry_run)


def parse_age(text: str) -> timedelta:
    """`30d`, `12h`, `90m`, `4w`."""
    if not (found := re.fullmatch(r"(\d+)([smhdw])", text)):
        raise InputError(f"{text!r} is no age; expected a number and one of s, m, h, d, w, as 30d")
    return timedelta(seconds=int(found[1]) * _UNITS[found[2]])


def parse_size(text: str) -> int:
    """`500G`, `2T`, `2TB`, `100000`: decimal, in bytes."""
    if not (found := re.fullmatch(r"(\d+)([KMGTP]?)B?", text)):
        raise InputError(f"{text!r} is no size; expected a number and one of K, M, G, T, P, as 500G")
    return int(found[1]) * _SIZES[found[2]]


def _opened(url: str | None, namespace: str) -> Archive:
    from belayer.journal.archive import open_archive

    if not url:
        raise InputError("no archive is named; give --archive, BELAYER_ARCHIVE_URL or archive_url in belayer.toml")
    return open_archive(url, namespace)


def _print_json(value: Any) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"
