"""How fast the audit is, against decoding the same file with msgspec alone, and how much memory it takes.

    python -m benchmarks.replay [--megabytes 64] [--rounds 5]

Two journals are written, of chunks of 256 and of 32 tokens, turns of 2,048 tokens each with an action and a boundary.
'Decoding alone' reads the export and decodes every entry with msgspec, and does nothing with it; the audit reads the
same file and checks everything. Both best of `rounds`, alternating. Without the file: the same on entries in memory,
where the digests alone (blake2b over every event, also measured) cost several times the decoding. Memory is the peak of
a process of its own that audits the file, and one that audits a journal eight times as long. The last line is one JSON
object; `audit_ratio` is the worse of the two chunk sizes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from belayer import ids
from belayer.journal.codec import GENESIS, Entry, Envelope, encode_entry
from belayer.journal.events import (
    ActionCommitted,
    ActionStarted,
    AnyEvent,
    EpochStarted,
    GenerationFinished,
    GenerationStarted,
    TokensAppended,
    TrajectoryFinished,
    TrajectoryStarted,
)
from belayer.journal.export import ExportWriter, read_export
from replay.audit import audit

TOKENS_A_TURN = 2048
TURNS = 30
BYTES_A_TOKEN = 9

_PEAK = """
import json, sys
from pathlib import Path
from belayer.journal.export import read_export
from replay.audit import audit
report = audit(read_export(sys.argv[1]))
status = Path("/proc/self/status").read_text()
print(json.dumps([len(report.findings), int(status.partition("VmHWM:")[2].split()[0]) / 1024]))
"""


def life(chunk_tokens: int) -> Iterator[AnyEvent]:
    """A trajectory's events."""
    yield EpochStarted(1, "benchmark")
    yield TrajectoryStarted("r", "task", b"")
    for turn in range(1, TURNS + 1):
        yield GenerationStarted(turn, "w", "w-1")
        for offset in range(0, TOKENS_A_TURN, chunk_tokens):
            ids_, logprobs = os.urandom(4 * chunk_tokens), os.urandom(4 * chunk_tokens)
            yield TokensAppended(turn, offset, chunk_tokens, ids_, logprobs, b"\x01" * chunk_tokens, 1)
        yield GenerationFinished(turn, TOKENS_A_TURN, "stop")
        yield ActionStarted(turn, "make test", 60.0, "box-1")
        yield ActionCommitted(turn, 0, os.urandom(800), os.urandom(16), 0.5)
    yield TrajectoryFinished("submitted")


def write(path: Path, chunk_tokens: int, size_bytes: int) -> int:
    """An export of about that size; how many events it holds."""
    written = 0
    with ExportWriter(path) as export:
        for number in range(max(1, size_bytes // (TURNS * TOKENS_A_TURN * BYTES_A_TOKEN))):
            sequence, digest, stream = 0, GENESIS, ids.trajectory(f"t{number}")
            for event in life(chunk_tokens):
                entry, digest = encode_entry(1, sequence, digest, [event], [ids.new_event_id()], time.time_ns())
                sequence = entry.last_sequence
                export.add(stream, entry)
            written += sequence
    return written


def best_s(rounds: int, *works: Callable[[], object]) -> list[float]:
    """The best time of each, tried in turns."""
    best = [float("inf")] * len(works)
    for _ in range(rounds):
        for n, work in enumerate(works):
            started = time.perf_counter()
            work()
            best[n] = min(best[n], time.perf_counter() - started)
    return best


def measure(path: Path, events: int, rounds: int) -> dict[str, float]:
    """Times of one export, in microseconds an event, and ratios."""
    decode = msgspec.msgpack.Decoder(list[Envelope]).decode

    def decode_alone() -> None:
        for _, entry in read_export(path):
            decode(entry.body)

    from_file = best_s(rounds, decode_alone, lambda: audit(read_export(path)))
    held = list(read_export(path))
    in_memory = best_s(
        rounds,
        lambda: [None for _, entry in held if decode(entry.body) is None],
        lambda: [None for _, entry in held if not digest(entry)],
        lambda: audit(held),
    )
    names = ("decode_alone_us", "audit_us", "decode_in_memory_us", "digests_in_memory_us", "audit_in_memory_us")
    figures = {name: round(spent / events * 1e6, 3) for name, spent in zip(names, from_file + in_memory, strict=True)}
    return figures | {
        "ratio": round(from_file[1] / from_file[0], 2),
        "in_memory_ratio": round(in_memory[2] / in_memory[0], 2),
        "events_per_s": round(events / from_file[1]),
        "megabytes_per_s": round(path.stat().st_size / from_file[1] / 1e6),
    }


def digest(entry: Entry) -> bytes:
    return hashlib.blake2b(entry.body, digest_size=16).digest()


def peak_megabytes(path: Path) -> float:
    """Peak resident memory of a process that audits the file."""
    ran = subprocess.run([sys.executable, "-c", _PEAK, str(path)], check=True, capture_output=True, text=True)
    findings, peak = json.loads(ran.stdout)
    if findings:
        raise SystemExit("the benchmark's own journal has findings")
    return round(peak, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the audit.")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    size_bytes = options.megabytes << 20
    with tempfile.TemporaryDirectory(prefix="belayer-benchmark-") as folder:
        path = Path(folder) / "journal.belayer"
        by_chunk: dict[str, dict[str, float]] = {}
        for chunk_tokens in (256, 32):
            events = write(path, chunk_tokens, size_bytes)
            by_chunk[str(chunk_tokens)] = measure(path, events, options.rounds)
            print(f"chunks of {chunk_tokens}: {by_chunk[str(chunk_tokens)]}")
        write(path, 256, size_bytes // 8)
        short_mb = peak_megabytes(path)
        write(path, 256, size_bytes)
        long_mb = peak_megabytes(path)
    figures = {
        "audit_ratio": max(one["ratio"] for one in by_chunk.values()),
        "audit_in_memory_ratio": max(one["in_memory_ratio"] for one in by_chunk.values()),
        "events_per_s": min(one["events_per_s"] for one in by_chunk.values()),
        "peak_memory_mb": long_mb,
        "peak_memory_mb_of_an_eighth": short_mb,
        "by_chunk_tokens": by_chunk,
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}",
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
