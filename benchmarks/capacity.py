"""What a day of a rollout costs: `python -m benchmarks.capacity [--gpus N] [--days N] ... [--markdown]`.

Pure arithmetic over measured figures (benchmarks/results/journal.json and archive.json); `cost_of` is the formula, and
docs/capacity.md is checked against it by tests/journal/test_capacity.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

RESULTS = Path(__file__).with_name("results")
DAY_S = 86_400
NOTICE_BYTES = 76
CONTROL_BYTES = 300e6
"""The control stream's bound, reached within the day."""
COMMAND_BYTES = 110
"""XADD's own words, key and id around a chunk's body, and the reply."""
OBSERVED_BYTES = 4.1
"""An observation's token: one u32, and its share of ActionCommitted."""


@dataclass(frozen=True)
class Run:
    """A rollout. Tokens are generated ones; `observed_share`: tokens of observations for each of them."""

    gpus: int = 1000
    tokens_per_s_gpu: float = 640.0
    concurrent: int = 4096
    tokens_per_trajectory: int = 30_000
    observed_share: float = 1.0
    chunk_tokens: int = 256
    archive_after_s: float = 60.0
    keep_days: int = 7


@dataclass(frozen=True)
class Measured:
    """From the benchmarks: bytes for a token in chunks of 256, and what one core and one archived trajectory take."""

    chunk_bytes: float
    server_bytes_per_token: float
    client_cpu_us_per_chunk: float
    server_chunks_per_s: float
    compression: float
    left_per_trajectory_bytes: float
    archiver_bytes_per_s: float


@dataclass(frozen=True)
class Cost:
    """Bytes, bytes a second, or shares of one core, as the names say. `day`: in 24 hours."""

    tokens_day: float
    trajectories_day: float
    chunks_per_s: float
    server_open_bytes: float
    server_ended_bytes: float
    server_marks_bytes: float
    server_bytes: float
    aof_largest_bytes: float
    aof_written_day_bytes: float
    append_bytes_per_s: float
    archive_read_bytes_per_s: float
    archive_written_bytes_per_s: float
    archive_day_bytes: float
    archive_kept_bytes: float
    client_cores: float
    server_busy_share: float
    archiver_busy_share: float
    without_archive_day_bytes: float


def cost_of(run: Run, measured: Measured) -> Cost:
    """The formula."""
    tokens_per_s = run.gpus * run.tokens_per_s_gpu
    chunks_per_s = tokens_per_s / run.chunk_tokens
    stored_per_token = measured.server_bytes_per_token + run.observed_share * OBSERVED_BYTES
    body_per_token = measured.chunk_bytes / run.chunk_tokens + run.observed_share * OBSERVED_BYTES
    trajectories_day = tokens_per_s * DAY_S / run.tokens_per_trajectory
    open_bytes = run.concurrent * run.tokens_per_trajectory / 2 * stored_per_token
    ended_bytes = tokens_per_s * run.archive_after_s * stored_per_token
    marks_bytes = trajectories_day * run.keep_days * measured.left_per_trajectory_bytes
    server_bytes = open_bytes + ended_bytes + marks_bytes + CONTROL_BYTES
    append_per_s = tokens_per_s * body_per_token + chunks_per_s * COMMAND_BYTES
    raw_per_s = tokens_per_s * body_per_token
    archive_per_s = raw_per_s / measured.compression
    return Cost(
        tokens_day=tokens_per_s * DAY_S,
        trajectories_day=trajectories_day,
        chunks_per_s=chunks_per_s,
        server_open_bytes=open_bytes,
        server_ended_bytes=ended_bytes,
        server_marks_bytes=marks_bytes,
        server_bytes=server_bytes,
        aof_largest_bytes=2 * server_bytes,
        aof_written_day_bytes=2 * append_per_s * DAY_S,
        append_bytes_per_s=append_per_s,
        archive_read_bytes_per_s=raw_per_s,
        archive_written_bytes_per_s=archive_per_s,
        archive_day_bytes=archive_per_s * DAY_S,
        archive_kept_bytes=archive_per_s * DAY_S * run.keep_days,
        client_cores=chunks_per_s * measured.client_cpu_us_per_chunk / 1e6,
        server_busy_share=chunks_per_s / measured.server_chunks_per_s,
        archiver_busy_share=raw_per_s / measured.archiver_bytes_per_s,
        without_archive_day_bytes=tokens_per_s * DAY_S * stored_per_token,
    )


def read_measured() -> Measured:
    """The last figures of the benchmarks, mode everysec, 4,096 trajectories (memory: 64, where it is exact)."""
    journal = json.loads((RESULTS / "journal.json").read_text())
    archive = json.loads((RESULTS / "archive.json").read_text())
    rows = {(row["mode"], row["trajectories"], row["chunk_tokens"]): row for row in journal["rows"]}
    many, few = rows["everysec", 4096, 256], rows["everysec", 64, 256]
    return Measured(
        chunk_bytes=many["chunk_bytes"],
        server_bytes_per_token=few["redis_bytes_per_token"],
        client_cpu_us_per_chunk=many["ours"]["client_cpu_us_per_chunk"],
        server_chunks_per_s=many["ours"]["chunks_per_s"],
        compression=archive["compression"],
        left_per_trajectory_bytes=archive["server_bytes_left_per_trajectory"],
        archiver_bytes_per_s=archive["archiver_mb_per_s"] * 1e6,
    )


def table(run: Run, cost: Cost) -> list[tuple[str, str, str]]:
    """What, how much, and whereof, for people."""
    return [
        (
            "generated tokens",
            f"{cost.tokens_day / 1e9:,.1f} billion a day",
            f"{run.gpus:,} GPUs x {run.tokens_per_s_gpu:g}/s",
        ),
        ("trajectories", f"{cost.trajectories_day:,.0f} a day", f"of {run.tokens_per_trajectory:,} tokens"),
        ("appends", f"{cost.chunks_per_s:,.0f} chunks/s", f"of {run.chunk_tokens} tokens"),
        ("server memory", _size(cost.server_bytes), "the sum of the next three, and 300 MB of notices"),
        ("- open trajectories", _size(cost.server_open_bytes), f"{run.concurrent:,}, half done on average"),
        ("- ended, not yet archived", _size(cost.server_ended_bytes), f"for {run.archive_after_s:g} s"),
        ("- marks of archived ones", _size(cost.server_marks_bytes), f"kept for {run.keep_days} days"),
        ("without an archive", f"{_size(cost.without_archive_day_bytes)} a day", "of server memory, never given back"),
        ("append-only file", f"up to {_size(cost.aof_largest_bytes)}", "rewritten when it has doubled"),
        (
            "written to the server's disk",
            f"{_size(cost.aof_written_day_bytes)} a day",
            "appends, and as much by rewrites",
        ),
        ("network to the server", f"{_size(cost.append_bytes_per_s)}/s", "and the same again to each replica"),
        ("network from the server", f"{_size(cost.archive_read_bytes_per_s)}/s", "read by the archiver"),
        ("archive", f"{_size(cost.archive_day_bytes)} a day", f"{_size(cost.archive_written_bytes_per_s)}/s of zstd"),
        ("archive kept", _size(cost.archive_kept_bytes), f"for {run.keep_days} days"),
        ("rollout processes", f"{cost.client_cores:.2f} cores", "for all appends together"),
        ("one server", f"{cost.server_busy_share:.0%} busy", "of what it takes on the benchmark's two shared cores"),
        ("one archiver", f"{cost.archiver_busy_share:.0%} busy", "likewise"),
    ]


def markdown(rows: Iterable[tuple[str, str, str]]) -> str:
    """As in docs/capacity.md."""
    lines = ["| what | how much | whereof |", "| --- | --- | --- |", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def _size(size_bytes: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes / 1e3:.1f} kB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--markdown", action="store_true", help="as a table for docs/capacity.md")
    for each in fields(Run):
        kind = int if isinstance(each.default, int) else float
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=kind, default=each.default)
    options = vars(parser.parse_args())
    as_markdown = options.pop("markdown")
    run = Run(**options)
    rows = table(run, cost_of(run, read_measured()))
    print(
        markdown(rows) if as_markdown else "\n".join(f"{what:30} {much:26} {whereof}" for what, much, whereof in rows)
    )


if __name__ == "__main__":
    main()
