"""The chain of one stream: sequences from 1 without gaps, the digest of the event before, epochs that never fall.

One damage is one finding: after a hole the digest is taken up anew, and a changed event is named once although both its
neighbours may disagree with it. Nothing here looks into an event but for EpochStarted.
"""

from __future__ import annotations

from belayer.journal.codec import GENESIS, Recorded
from belayer.journal.events import EpochStarted
from replay.findings import Check, Findings


class Chain:
    """Where the stream stands; `whole` until events are missing or unreadable, for then nobody knows what they said."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self.epoch = 0
        self.sequence = 0
        self.writer_version = ""
        self.digest: bytes | None = GENESIS
        self.whole = True
        self._hole = range(0)
        self._link_broken = False
        self._undeclared = 0

    def accept(self, recorded: Recorded) -> bool:
        """Take the next event in. False when it is one that was here before or comes late: it says nothing new."""
        expected = self.sequence + 1
        if recorded.sequence < expected:
            if recorded.sequence not in self._hole:
                self._say(recorded.sequence, Check.SEQUENCE, f"comes again after sequence {self.sequence}")
            return False
        after_hole = recorded.sequence > expected
        if after_hole:
            self._miss(expected, recorded.sequence)
        self._check_link(recorded)
        self._check_epoch(recorded, after_hole)
        self.sequence, self.digest = recorded.sequence, recorded.digest
        return True

    def unreadable(self, last_sequence: int, problem: str) -> None:
        """An entry whose bytes are no events."""
        self._say(last_sequence, Check.ENCODING, f"{problem}; what follows is not checked against the rules")
        self.sequence, self.digest, self.whole = max(self.sequence, last_sequence), None, False

    def _miss(self, expected: int, found: int) -> None:
        self._hole = range(expected, found)
        missing = f"events {expected} to {found - 1} are" if found - expected > 1 else f"event {expected} is"
        self._say(found, Check.SEQUENCE, f"{missing} missing; what follows is not checked against the rules")
        self.digest, self.whole = None, False

    def _check_link(self, recorded: Recorded) -> None:
        broken = self.digest is not None and recorded.previous_digest != self.digest
        if broken and not self._link_broken:
            before = f"event {recorded.sequence - 1}" if recorded.sequence > 1 else "the stream's beginning"
            self._say(
                recorded.sequence,
                Check.DIGEST,
                f"{before} is not what this event was written after: one of the two was changed",
            )
        self._link_broken = broken

    def _check_epoch(self, recorded: Recorded, after_hole: bool) -> None:
        epoch, event = recorded.epoch, recorded.event
        if isinstance(event, EpochStarted):
            if event.epoch != epoch:
                self._say(recorded.sequence, Check.EPOCH, f"epoch {event.epoch} starts in an entry of epoch {epoch}")
            elif epoch != self.epoch + 1 and not (after_hole and epoch > self.epoch):
                self._say(recorded.sequence, Check.EPOCH, f"epoch {epoch} starts after epoch {self.epoch}")
            self.epoch = max(epoch, self.epoch)
            self.writer_version = event.belayer_version
            return
        if epoch < self.epoch:
            self._say(
                recorded.sequence, Check.EPOCH, f"written under epoch {epoch}, which epoch {self.epoch} had fenced off"
            )
        elif (epoch > self.epoch and after_hole) or epoch == self._undeclared:
            self.epoch = epoch
        elif epoch > self.epoch:
            self._say(recorded.sequence, Check.EPOCH, f"epoch {epoch} begins here without an EpochStarted")
            self._undeclared = epoch
            return
        self._undeclared = 0

    def _say(self, sequence: int, check: Check, message: str) -> None:
        self._findings.add(sequence, check, message)
