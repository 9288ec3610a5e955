"""The loop that every actor runs: take a notice, look, act, say done.

A notice only says where to look, so handling it twice, late or for nothing is harmless; what makes an action happen
once is the epoch that its handler takes. A handler that fails leaves its notice pending, and a dead actor leaves all
of its own: they go stale and come to whichever actor asks next, or at once to one on the same host (`peers.py`). Work
in progress is renewed, so that only the dead lose it. What would fail again each time must not be left for the next
try: such work goes through `foreseen`, and its failure into the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Protocol, TypeVar

import structlog

from belayer.actors.peers import Peers
from belayer.errors import BelayerError, FencedError, JournalUnavailableError, UnforeseenError, WrongSequenceError
from belayer.journal.store import JournalStore, Notice, Subscription
from belayer.observe.position import Beginning, at, position

T = TypeVar("T")
log = structlog.get_logger("belayer.actors")

RENEWALS = 4
"""How often a notice is renewed in the time after which it is stale."""
LOOKS = 4
"""How often it is looked for new peers in that time."""
POLL_S = 1.0


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
                task = tasks.create_task(_handle(notices, actor, notice))
                task.add_done_callback(lambda _: slots.release())
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


async def _handle(notices: Subscription, actor: Actor, notice: Notice) -> None:
    at(Beginning(notice.stream))
    renewing = asyncio.create_task(_renew(notices, notice, actor.stale_after_s / RENEWALS))
    try:
        await _until_settled(actor, notice)
    except Exception as error:
        expected = isinstance(error, BelayerError | TimeoutError)
        log.warning(
            "left for the next try",
            actor=actor.name,
            error=str(error),
            exc_info=not expected,
            **position(),
        )
    else:
        await _quietly(notices.done(notice))
    finally:
        renewing.cancel()


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
    with contextlib.suppress(JournalUnavailableError):
        await call
