"""The loop that every actor runs: take a notice, look, act, say done.

A notice only says where to look, so handling it twice, late or for nothing is harmless; what makes an action happen
once is the epoch that its handler takes. A handler that fails leaves its notice pending, and a dead actor leaves all
of its own: they go stale and come to whichever actor asks next, or at once to one on the same host (`peers.py`). Work
in progress is renewed, so that only the dead lose it. What would fail again each time must not be left for the next
try: such work goes through `foreseen`, and its failure into the journal. What passes (a daemon that is down, a disk
that is full) is tried again and again, after pauses that grow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol, TypeVar

import structlog

from belayer.actors.peers import Peers
from belayer.errors import (
    BelayerError,
    CodecError,
    FencedError,
    JournalError,
    JournalUnavailableError,
    UnforeseenError,
    WrongSequenceError,
)
from belayer.journal.store import JournalStore, Notice, Subscription
from belayer.observe.position import Beginning, at, position

T = TypeVar("T")
log = structlog.get_logger("belayer.actors")

RENEWALS = 4
"""How often a notice is renewed in the time after which it is stale."""
LOOKS = 4
"""How often it is looked for new peers in that time."""
POLL_S = 1.0
LONGEST_REST_S = 30.0
"""Between two tries of what has failed often."""
_COUNTED = 10_000
"""So many notices' failures are counted at most."""


class Actor(Protocol):
    """What an actor is: a name, the notices that it wants, and what it does about one of them."""

    name: str
    tags: frozenset[str]
    concurrency: int
    stale_after_s: float
    """How long a notice may be without a sign of life of whoever has it, before another takes it: what the death of an
    actor costs that nobody on its host outlives. A busy one that is late only makes another look, and wait for it."""

    async def handle(self, notice: Notice) -> None: ...


async def run_actor(store: JournalStore, actor: Actor, host: str, consumer: str, peers: Peers | None = None) -> None:
    """Run until cancelled. Actors of one name on one host share the notices; every host sees all of them.

    `peers`: those of this process, when it has several actors.
    """
    slots = asyncio.Semaphore(actor.concurrency)
    failures: dict[str, int] = {}
    peers = peers or Peers(host, consumer)
    async with (
        store.subscribe(f"{actor.name}@{host}", consumer, actor.stale_after_s) as notices,
        peers.inheriting(notices, actor.stale_after_s / LOOKS),
        asyncio.TaskGroup() as tasks,
    ):
        while True:
            await slots.acquire()
            notice = await _next(notices, actor)
            if notice.tag in actor.tags:
                tasks.create_task(_handle(notices, actor, notice, slots, failures))
            else:
                slots.release()
                await _quietly(notices.done(notice))


async def _next(notices: Subscription, actor: Actor) -> Notice:
    while True:
        try:
            if (notice := await notices.next(POLL_S)) is not None:
                return notice
        except JournalUnavailableError as error:
            log.warning("the journal does not answer; asking again", actor=actor.name, error=str(error))
            await asyncio.sleep(POLL_S)
        except CodecError as error:  # left for whoever can read it: a newer version, in the same group
            log.warning("a notice cannot be read", actor=actor.name, error=str(error))


async def _handle(
    notices: Subscription, actor: Actor, notice: Notice, slots: asyncio.Semaphore, failures: dict[str, int]
) -> None:
    at(Beginning(notice.stream))
    renewing = asyncio.create_task(_renew(notices, notice, actor.stale_after_s / RENEWALS))
    pause_s = 0.0
    try:
        await _until_settled(actor, notice)
    except Exception as error:
        if len(failures) >= _COUNTED:
            failures.clear()
        before = failures.get(notice.delivery, 0)
        failures[notice.delivery] = before + 1
        pause_s = rest_s(actor.stale_after_s, before)
        expected = isinstance(error, BelayerError | TimeoutError)
        log.warning(
            "left for the next try",
            actor=actor.name,
            error=str(error),
            again_in_s=pause_s + actor.stale_after_s,
            exc_info=not expected,
            **position(),
        )
    else:
        failures.pop(notice.delivery, None)
        await _quietly(notices.done(notice))
    finally:
        slots.release()
        try:
            await asyncio.sleep(pause_s)  # it stays ours meanwhile, and then goes stale
        finally:
            renewing.cancel()


def rest_s(stale_after_s: float, failed_before: int) -> float:
    """How long a notice is kept that has failed again: not at all at first, then longer and longer."""
    return min(LONGEST_REST_S, stale_after_s * (2.0 ** min(failed_before, 16) - 1))


async def foreseen(what: str, work: Awaitable[T]) -> T:
    """What the work gives. UnforeseenError, and its traceback in the log, for any error that is none of Belayer's."""
    try:
        return await work
    except BelayerError:
        raise
    except Exception as error:
        log.exception("an error that nobody foresaw", work=what, **position())
        raise UnforeseenError(what, error) from error


async def _until_settled(actor: Actor, notice: Notice) -> None:
    """Handle it; when another writer came in between, look again: the work is done, or still to be done."""
    while True:
        try:
            return await actor.handle(notice)
        except (FencedError, WrongSequenceError) as error:
            log.info("overtaken; looking again", actor=actor.name, error=str(error), **position())


async def _renew(notices: Subscription, notice: Notice, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        await _quietly(notices.renew(notice))


async def _quietly(call: Awaitable[None]) -> None:
    """A notice that could not be renewed or finished comes again; that costs a look and nothing else."""
    try:
        await call
    except JournalUnavailableError:
        pass
    except JournalError as error:
        log.warning("a notice could not be renewed or finished", error=str(error), **position())
