"""Every error that Belayer raises on purpose. Each carries its facts as fields and says what to do in its message.

A command ends with exit code 2 and the message alone for any BelayerError; a traceback therefore always means a bug.
"""

from __future__ import annotations

from collections.abc import Sequence


class BelayerError(Exception):
    """The root of Belayer's own errors."""


class UnforeseenError(BelayerError):
    """A piece of work ended with an error that is none of Belayer's: a bug, whose traceback is in the log. The work is
    given up like any that failed; trying it again would end the same way."""

    def __init__(self, work: str, error: Exception) -> None:
        super().__init__(f"{work} ended with {repr(error)[:500]}; this is a bug of Belayer's, please report it")
        self.work = work
        self.error = error


class InputError(BelayerError):
    """Something that a person gave us is not usable; the message names it and what was expected."""


# --- journal -----------------------------------------------------------------------------------------------------


class JournalError(BelayerError):
    """The root of the journal's errors."""


class FencedError(JournalError):
    """A later writer has taken the stream over; this writer must stop and read the journal again."""

    def __init__(self, stream: str, epoch: int, current_epoch: int) -> None:
        super().__init__(
            f"{stream}: epoch {epoch} is fenced off by epoch {current_epoch}; "
            "stop writing, read the stream again and take it over if the work is still yours"
        )
        self.stream = stream
        self.epoch = epoch
        self.current_epoch = current_epoch


class WrongSequenceError(JournalError):
    """The writer believed in another last sequence than the stream has."""

    def __init__(self, stream: str, expected: int, actual: int) -> None:
        super().__init__(
            f"{stream}: expected sequence {expected} to be the last one, but the stream is at {actual}; "
            "read the stream again before appending"
        )
        self.stream = stream
        self.expected = expected
        self.actual = actual


class JournalUnavailableError(JournalError):
    """The server did not answer in time. Whether the append took effect is unknown: ask by event id."""

    def __init__(self, address: str, waited_s: float, cause: str) -> None:
        super().__init__(f"no answer from the journal at {address} for {waited_s:.1f} s ({cause}); is the server up?")
        self.address = address
        self.waited_s = waited_s
        self.cause = cause


class ServerRefusedError(JournalError):
    """The server cannot keep what the durability mode promises; said at connect, before anything is written."""

    def __init__(self, address: str, what: str, found: str, remedy: str) -> None:
        super().__init__(f"the server at {address} cannot be used: {what} (found: {found}); {remedy}")
        self.address = address
        self.what = what
        self.found = found
        self.remedy = remedy


class UnknownStreamError(JournalError):
    """No stream of that name is in the journal. `near`: names that may have been meant."""

    def __init__(
        self, stream: str, hint: str = "`belayer status` lists what the journal has", near: Sequence[str] = ()
    ) -> None:
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        super().__init__(f"{stream} is not in the journal; {meant}{hint}")
        self.stream = stream
        self.near = tuple(near)


class CodecError(JournalError):
    """Stored bytes are not an event that this version can read."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


class UnknownEventError(CodecError):
    """An event of a tag that this version does not know. `written_by`: the newer Belayer, as far as it is known."""

    def __init__(self, where: str, tag: str, known_version: str, written_by: str = "") -> None:
        wrote = f"Belayer {written_by} wrote it" if written_by else "a newer Belayer wrote it"
        unknown = f"event tag {tag!r} is unknown to Belayer {known_version}"
        super().__init__(where, f"{unknown}; {wrote}: read it with that version or a newer one")
        self.tag = tag
        self.known_version = known_version
        self.written_by = written_by

    def by(self, version: str) -> UnknownEventError:
        """The same error with the version that wrote the event, unless it is known already."""
        return UnknownEventError(self.where, self.tag, self.known_version, self.written_by or version)


class MissingKeyError(JournalError):
    """A payload is sealed with a key that this process does not have."""

    def __init__(self, where: str, key: str, known: list[str]) -> None:
        have = f"the keys here are {', '.join(known)}" if known else "there is no key here"
        super().__init__(f"{where}: sealed with key {key!r}; {have}; name it in BELAYER_ENCRYPTION_KEYS")
        self.where = where
        self.key = key
        self.known = known


class WrongKeyError(JournalError):
    """A sealed payload does not open with the key of its name."""

    def __init__(self, where: str, key: str) -> None:
        super().__init__(
            f"{where}: key {key!r} does not open it: another key has this name here, or the bytes were changed "
            "(`belayer audit` tells, without a key)"
        )
        self.where = where
        self.key = key


class DamagedJournalError(JournalError):
    """A stream whose digests, sequences or epochs do not hang together; `belayer audit` names every place."""

    def __init__(self, stream: str, sequence: int, problem: str) -> None:
        super().__init__(f"{stream} at sequence {sequence}: {problem}; `belayer audit` lists every finding")
        self.stream = stream
        self.sequence = sequence
        self.problem = problem


class LimitError(JournalError):
    """An append is larger than one writer may; nothing of it was stored, and the writer may go on with less."""

    def __init__(self, stream: str, what: str, limit: int, got: int, remedy: str) -> None:
        super().__init__(f"{stream}: at most {limit:,} {what}, got {got:,}; {remedy} (belayer.journal.limits)")
        self.stream = stream
        self.what = what
        self.limit = limit
        self.got = got


class ArchivedError(JournalError):
    """The stream's beginning is in the archive and no longer on the server, and the reader was given no archive."""

    def __init__(self, stream: str, through_sequence: int, segment: str) -> None:
        super().__init__(
            f"{stream}: events 1 to {through_sequence} were archived in segment {segment}; "
            "name the archive with --archive or BELAYER_ARCHIVE_URL"
        )
        self.stream = stream
        self.through_sequence = through_sequence
        self.segment = segment


class ArchiveError(JournalError):
    """The archive cannot be used, or something in it is not what was written; nothing on the server was touched."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"archive {where}: {problem}")
        self.where = where
        self.problem = problem


class ProtocolError(JournalError):
    """The caller's next event does not fit the trajectory's state (for example tokens without a generation)."""


# --- engines -----------------------------------------------------------------------------------------------------


class EngineFailedError(BelayerError):
    """An engine process died, hung or broke its stream: an infrastructure failure, never a model output."""

    def __init__(self, incarnation: str, evidence: str) -> None:
        super().__init__(f"engine {incarnation} failed: {evidence}")
        self.incarnation = incarnation
        self.evidence = evidence


class UnguardedMainError(EngineFailedError):
    """The main's memory server is gone: the main serves on, but no shadow can take it over."""


class PrefixRefusedError(BelayerError):
    """The recorded engine was given a prefix that is not the recording's: the caller resumed wrongly."""

    def __init__(self, offset: int, problem: str) -> None:
        super().__init__(f"the prefix is not the recording's at token {offset}: {problem}")
        self.offset = offset
        self.problem = problem


# --- sandbox -----------------------------------------------------------------------------------------------------


class SandboxError(BelayerError):
    """The root of the sandbox's errors."""


class SandboxFailedError(SandboxError):
    """The container is dead or does not answer: an infrastructure failure, never an observation."""

    def __init__(self, incarnation: str, evidence: str) -> None:
        super().__init__(f"sandbox {incarnation} failed: {evidence}")
        self.incarnation = incarnation
        self.evidence = evidence


class HostUnfitError(SandboxError):
    """This machine cannot run sandboxes (Docker down, CRIU missing, not root); `belayer doctor` says more."""

    def __init__(self, what: str, found: str, remedy: str) -> None:
        super().__init__(f"{what}: {found}; {remedy}")
        self.what = what
        self.found = found
        self.remedy = remedy


class CheckpointRefusedError(SandboxError):
    """The sandbox is in a state that a checkpoint would not capture whole; nothing was frozen for it or published."""

    def __init__(self, incarnation: str, cause: str, process: str = "") -> None:
        named = f" (process {process})" if process else ""
        super().__init__(f"sandbox {incarnation} cannot be checkpointed now: {cause}{named}")
        self.incarnation = incarnation
        self.cause = cause
        self.process = process


class CheckpointFailedError(SandboxError):
    """A checkpoint was begun and given up; whatever it wrote is removed and the sandbox goes on."""

    def __init__(self, checkpoint: str, cause: str) -> None:
        super().__init__(f"checkpoint {checkpoint} was given up: {cause}")
        self.checkpoint = checkpoint
        self.cause = cause


class RestoreFailedError(SandboxError):
    """A checkpoint could not be restored; whatever was created for it is removed."""

    def __init__(self, checkpoint: str, cause: str) -> None:
        super().__init__(f"checkpoint {checkpoint} could not be restored: {cause}")
        self.checkpoint = checkpoint
        self.cause = cause


class CheckpointUnfitError(RestoreFailedError):
    """The checkpoint was made on a machine from which this one differs in something that it needs."""

    def __init__(self, checkpoint: str, what: str, there: str, here: str) -> None:
        super().__init__(
            checkpoint, f"{what} is {there} where it was made and {here} here; restore it on another machine"
        )
        self.what = what
        self.there = there
        self.here = here


class RestoreMismatchError(RestoreFailedError):
    """What a restore has put in place is not what was captured; none of its processes has run."""

    def __init__(self, checkpoint: str, what: str, expected: str, found: str) -> None:
        super().__init__(checkpoint, f"{what} was {expected!r} when it was captured and would now be {found!r}")
        self.what = what
        self.expected = expected
        self.found = found
