"""The audit of a whole journal: each stream by itself, then what one stream says of another.

Streams come one after another, in any order. What is kept of a stream that has been read is small (boundaries,
incarnations, checkpoints), so memory does not grow with tokens. Reads nothing itself: entries come from an export or
from a store that the caller has.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter

import msgspec

from belayer.errors import InputError
from belayer.ids import StreamId, StreamKind
from belayer.journal.codec import Entry
from belayer.journal.sealing import Keyring
from replay.facts import RunFacts, SandboxFacts, TrajectoryFacts, WorkerFacts
from replay.findings import Check, Finding, Findings
from replay.pairs import check_captures, check_engines, check_restores, check_resumptions
from replay.stream_audit import StreamAudit, StreamResult


class Report(msgspec.Struct, frozen=True):
    """What an audit found. `streams` counts them by kind; `unpaired`: sandboxes whose trajectory is not here."""

    findings: list[Finding]
    streams: dict[str, int]
    events: int
    entries: int
    unpaired: list[str]
    sealed: dict[str, int]
    """Payloads that were not checked, by the key that is not here."""
    seconds: float


def audit(entries: Iterable[tuple[StreamId, Entry]], keyring: Keyring | None = None) -> Report:
    """Audit entries in which those of one stream stand together, in order. One pass, memory flat in their number.

    Sealed payloads are opened and checked as far as their keys are there.
    """
    started = time.perf_counter()
    journal = JournalAudit()
    for stream, group in groupby(entries, key=itemgetter(0)):
        one = StreamAudit(stream, keyring)
        one.feed(group)
        journal.add(one.close())
    return journal.report(time.perf_counter() - started)


class JournalAudit:
    """Collects the results of single streams and compares them at the end."""

    def __init__(self) -> None:
        self._results: dict[StreamId, StreamResult] = {}
        self._findings: list[Finding] = []

    def add(self, result: StreamResult) -> None:
        """A stream has been read to its end. InputError when it had been read before."""
        if result.stream in self._results:
            raise InputError(f"{result.stream} comes twice; the entries of one stream must stand together")
        self._findings += result.findings
        self._results[result.stream] = result

    def report(self, seconds: float) -> Report:
        """All findings, in order of stream and sequence."""
        unpaired: list[str] = []
        for stream, result in self._results.items():
            match result.facts:
                case SandboxFacts():
                    if not self._check_sandbox(stream, result.facts):
                        unpaired.append(str(stream))
                    self._check_recovery(stream, result.facts)
                case TrajectoryFacts():
                    self._check_engines(stream, result.facts)
                    self._check_recovery(stream, result.facts)
                case WorkerFacts():
                    self._check_recovery(stream, result.facts)
                case RunFacts():
                    pass
        results = self._results.values()
        return Report(
            findings=sorted(self._findings),
            streams=dict(sorted(Counter(str(stream.kind) for stream in self._results).items())),
            events=sum(result.events for result in results),
            entries=sum(result.entries for result in results),
            unpaired=unpaired,
            sealed=dict(sorted(sum((result.sealed for result in results), Counter[str]()).items())),
            seconds=seconds,
        )

    def _check_sandbox(self, stream: StreamId, sandbox: SandboxFacts) -> bool:
        """False when the trajectory is not here to compare with."""
        other = StreamId(StreamKind.TRAJECTORY, stream.name)
        result = self._results.get(other)
        if result is None:
            return False
        trajectory = result.facts
        assert isinstance(trajectory, TrajectoryFacts)
        ours, theirs = Findings(str(stream)), Findings(str(other))
        if trajectory.whole:
            check_captures(sandbox, trajectory, ours)
            check_restores(sandbox, trajectory, ours)
        if sandbox.whole:
            check_resumptions(trajectory, sandbox, theirs)
        self._findings += ours.found + theirs.found
        return True

    def _check_engines(self, stream: StreamId, trajectory: TrajectoryFacts) -> None:
        findings = Findings(str(stream))
        for name in sorted({worker for worker, _ in trajectory.engines}):
            result = self._results.get(StreamId(StreamKind.WORKER, name))
            if result is not None and isinstance(result.facts, WorkerFacts) and result.facts.whole:
                worker = result.facts
                if self._is_over(worker.run) is True:
                    check_engines(trajectory, name, worker, findings)
        self._findings += findings.found

    def _check_recovery(self, stream: StreamId, facts: TrajectoryFacts | SandboxFacts | WorkerFacts) -> None:
        """A recovery that is still open, unless its run goes on, was never completed."""
        if facts.whole and facts.recovery_at and self._is_over(facts.run) is not False:
            findings = Findings(str(stream))
            findings.add(facts.recovery_at, Check.RECOVERY, "the recovery that was started here was never completed")
            self._findings += findings.found

    def _is_over(self, run: str) -> bool | None:
        """Whether the run has finished; None when its stream is not here."""
        result = self._results.get(StreamId(StreamKind.RUN, run))
        return result.facts.finished if result is not None and isinstance(result.facts, RunFacts) else None
