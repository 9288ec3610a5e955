"""Lends the KV arena: to one holder at a time, under an epoch that only grows.

An armed shadow has the KV memory readable, and the holder's books (slot table and ledger; its own it has from the
start), all mapped ahead of time, because the driver is slow while it tears a dead process down. When the holder's bell
rings the shadow becomes the holder and adopts; the KV to write is lent to it once the old process is dead.

Invariants: there is one holder. KV is lent for writing once the process that had it is dead; or, when the host asked
for it, once its bell has rung, and then the next one is told what it must not touch until the death (docs/decisions
say why that is safe). While that lasts nobody else is lent to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from belayer.gpu import wire
from belayer.gpu.arena import ArenaOwner, Lendable
from belayer.gpu.books import Books
from belayer.gpu.errors import ArenaRefusedError, LeaseHeldError, LeaseLostError
from belayer.gpu.peers import Notify, Peer
from belayer.gpu.progress import HangRule, abandoned_update, hang_evidence
from belayer.gpu.weights_desk import WeightsDesk, must_be_same

_TIDY_AFTER_S = 1.0


class _Promotion:
    """A promotion under way, from the host's request until the shadow serves."""

    def __init__(self, asked_by: Peer, request: wire.Promote, shadow: Peer) -> None:
        self.asked_by = asked_by
        self.request = request
        self.shadow = shadow
        self.began_s = time.monotonic()
        self.granted_s: float | None = None


class ArenaDesk:
    """One device's KV arena. `later` runs a function in the server's thread, from any thread."""

    def __init__(
        self, owner: ArenaOwner, weights: WeightsDesk, rule: HangRule, notify: Notify, later: Callable[..., None]
    ) -> None:
        self._owner = owner
        self._weights = weights
        self._rule = rule
        self._notify = notify
        self._later = later
        self.region: wire.Region | None = None
        self._kv: Lendable | None = None
        self._books: Books | None = None
        """The holder's, or the last one's when there is no holder."""
        self._old_books: Books | None = None
        """Those of the holder before, which the holder may be reading."""
        self._garbage: list[Books] = []
        self.epoch = 0
        self.holder: Peer | None = None
        self._serving = False
        self._may_write = False
        self._dying: Peer | None = None
        self._promotion: _Promotion | None = None
        self._arming: dict[Peer, Peer] = {}
        self._armed: dict[Peer, Books | None] = {}
        """Armed shadows, and whose books they have mapped."""
        self._changed_s = 0.0

    # --- requests -----------------------------------------------------------------------------------------------

    def open(self, peer: Peer, request: wire.OpenArena) -> None:
        """A main gets the lease now or is refused; a shadow's wish is noted."""
        size_bytes = request.kv_bytes + 2 * request.table_bytes
        if self.region is None:
            self._kv = Lendable(self._owner, request.kv_bytes)
            self.region = wire.Region(request.spec, size_bytes)
        must_be_same("KV arena", self.region, request.spec, size_bytes)
        if peer.role != "shadow":
            self.need_nobody()
        if peer.books is None:
            peer.books = Books(self._owner, request)
        if peer.role == "shadow":
            peer.answer(wire.ArenaLent(0), peer.books.to_write())
            return
        self._becomes_holder(peer, peer.books, may_write=True)
        last = self._old_books
        fds = (*peer.books.to_write(), self._kv_fd(writable=True), *(last.to_read() if last else ()))
        peer.answer(wire.ArenaLent(self.epoch, last.epoch if last else 0), fds)

    def need_nobody(self) -> None:
        """LeaseHeldError while somebody holds the lease, is about to, or is not dead yet after holding it."""
        for other in (self.holder, self._dying, self._promotion.shadow if self._promotion else None):
            if other is not None:
                raise LeaseHeldError(other.incarnation, other.pid, self.epoch)

    def need_lease(self, peer: Peer) -> None:
        """LeaseLostError when the peer is not the holder."""
        if self.holder is not peer:
            raise LeaseLostError(peer.incarnation, 0, self.epoch)

    def serving(self, peer: Peer, facts: dict[str, float]) -> None:
        """The holder serves: listen to its bell, and end the promotion that made it the holder."""
        self.need_lease(peer)
        assert self._books is not None
        epoch, bell = self.epoch, self._books.ledger.bell
        threading.Thread(
            target=lambda: (bell.wait(), self._later(self._rang, epoch)), name=f"bell-{epoch}", daemon=True
        ).start()
        self._serving = True
        promotion = self._promotion
        if promotion is not None and promotion.shadow is peer and promotion.granted_s is not None:
            self._promotion = None
            peer.role, peer.armed, peer.warm = "main", False, True
            waited_s = promotion.granted_s - promotion.began_s
            promotion.asked_by.answer(wire.Facts({"prove_s": waited_s, **self._weights_fact(), **facts}))

    def arm(self, asked_by: Peer, engine: Peer) -> None:
        """The engine is warm: watch the holder for hangs, arm a shadow."""
        if engine is self.holder or engine.armed:
            engine.warm = True
            asked_by.answer(wire.Facts({}))
        elif engine.books is None:
            raise ArenaRefusedError(f"{engine.incarnation} has not asked for the arena")
        else:
            self._arming[engine] = asked_by
            engine.answer(wire.ArmNow(), (self._kv_fd(writable=False),))

    def armed(self, peer: Peer, facts: dict[str, float]) -> None:
        asked_by = self._arming.pop(peer, None)
        if asked_by is None:
            raise ArenaRefusedError(f"{peer.incarnation} is armed and nobody asked for it")
        peer.armed = True
        self._armed[peer] = None
        self._let_follow(peer)
        asked_by.answer(wire.Facts(facts))

    def promote(self, asked_by: Peer, request: wire.Promote, shadow: Peer) -> None:
        """Begin a promotion; the answer comes when the shadow serves."""
        if shadow is self.holder:
            if self._serving:
                asked_by.answer(wire.Facts(self._weights_fact()))
            else:  # the promotion that made it the holder was given up
                self._promotion = _Promotion(asked_by, request, shadow)
                self._promotion.granted_s = self._promotion.began_s
            return
        if self._weights.state.state != "ready" and self._weights.writer is not self.holder:
            raise self._weights.torn()
        if not shadow.armed:
            raise ArenaRefusedError(f"{request.incarnation} is not armed; arm it first")
        if self._promotion is not None:
            raise ArenaRefusedError(f"{self._promotion.request.incarnation} is being promoted")
        if self.holder is not None and self.holder.alive:
            if not request.kill_old and not self.holder.dying:
                raise LeaseHeldError(self.holder.incarnation, self.holder.pid, self.epoch)
            if request.kill_old:
                self.holder.kill()  # also when it is dying: a process may outlive its scheduler's thread
        self._promotion = _Promotion(asked_by, request, shadow)
        self._advance()

    def _weights_fact(self) -> dict[str, float]:
        return {wire.WEIGHT_VERSION: float(self._weights.state.version)}

    # --- what happens to engines --------------------------------------------------------------------------------

    def _rang(self, epoch: int) -> None:
        """The bell of that epoch's holder: its scheduler thread is gone."""
        if self.holder is not None and epoch == self.epoch:
            self._is_dying(self.holder)
            self._advance()

    def _is_dying(self, holder: Peer) -> None:
        if not holder.dying:
            holder.dying = True
            self._notify(wire.EngineEvent("dying", holder.incarnation, "its scheduler thread ended"))

    def died(self, peer: Peer) -> None:
        """A process is dead."""
        self._arming.pop(peer, None)
        self._armed.pop(peer, None)
        if peer.books is not None and peer.books not in (self._books, self._old_books):
            self._garbage.append(peer.books)
        if peer in (self.holder, self._dying):
            self._is_dying(peer)
            self._notify(wire.EngineEvent("dead", peer.incarnation, f"process {peer.pid} ended"))
        if self.holder is peer:
            self.holder = None
        if self._dying is peer:
            self._dying = None
            if self.holder is not None:
                self._let_write(self.holder)
        promotion = self._promotion
        if promotion is not None and promotion.shadow is peer:
            self._give_up(promotion, f"{peer.incarnation} died while it was promoted")
        self._advance()

    def tick(self) -> None:
        """Deadlines: of the promotion, of the holder's silence, and of a weight update that it began."""
        promotion, holder = self._promotion, self.holder
        if promotion is not None and time.monotonic() - promotion.began_s > promotion.request.timeout_s:
            phase = "see its predecessor die" if self._dying or promotion.granted_s is None else "adopt"
            self._give_up(promotion, f"{promotion.shadow.incarnation} did not {phase} in time")
        if holder is not None and holder.alive and holder.warm and not holder.dying:
            assert self._books is not None
            progress = self._books.ledger.progress()
            evidence = hang_evidence(progress, self.epoch, holder.pid, self._rule)
            if self._weights.writer is holder:
                evidence = evidence or abandoned_update(progress, self._weights.state.version, self._rule)
            if evidence:
                self._notify(wire.EngineEvent("hung", holder.incarnation, evidence))
                holder.warm = False
                holder.kill()
        if promotion is None and self._dying is None and time.monotonic() - self._changed_s > _TIDY_AFTER_S:
            self._tidy()

    def _tidy(self) -> None:
        """What can wait until long after a handover, because the driver would make everybody wait for it."""
        for shadow, books in self._armed.items():
            if books is not self._books:
                self._let_follow(shadow)
        while self._garbage:
            self._garbage.pop().release()

    def _give_up(self, promotion: _Promotion, cause: str) -> None:
        self._promotion = None
        promotion.asked_by.answer(wire.refusal(ArenaRefusedError(cause)))

    def _advance(self) -> None:
        """Lend to the shadow that is being promoted, as soon as that is safe."""
        promotion = self._promotion
        if promotion is None or promotion.granted_s is not None or self._dying is not None:
            return
        holder, shadow = self.holder, promotion.shadow
        if holder is not None and not holder.dying:
            return
        if self._weights.state.state != "ready":
            if self._weights.state.state == "torn":
                self._promotion = None
                promotion.asked_by.answer(wire.refusal(self._weights.torn()))
            return
        assert shadow.books is not None
        early = promotion.request.early
        writable, quarantined = early or holder is None, early and holder is not None
        self._dying, self.holder = holder, None
        followed = self._armed.pop(shadow)
        self._becomes_holder(shadow, shadow.books, may_write=writable)
        last = self._old_books
        fds = (self._kv_fd(writable=True),) if writable else ()
        follow = last is not None and followed is not last
        if last is not None and follow:
            fds += last.to_read()
        promotion.granted_s = time.monotonic()
        last_epoch = last.epoch if last else 0
        adopt = promotion.request.adopt
        version = self._weights.state.version
        shadow.answer(wire.Granted(self.epoch, last_epoch, version, adopt, writable, quarantined, follow), fds)

    def _becomes_holder(self, peer: Peer, books: Books, *, may_write: bool) -> None:
        """Under a new epoch. The caller has seen to it that nobody holds the lease, or that it waits to write."""
        assert self.holder is None
        if not peer.alive:
            raise ArenaRefusedError(f"{peer.incarnation} (pid {peer.pid}) is dead")
        if self._old_books is not None:
            self._garbage.append(self._old_books)
        self._old_books, self._books = self._books, books
        self.epoch += 1
        books.epoch = self.epoch
        self.holder, self._serving, self._may_write = peer, False, may_write
        self._changed_s = time.monotonic()

    def _let_write(self, holder: Peer) -> None:
        """The one before is dead: end the quarantine, or give what the holder waits for."""
        self._changed_s = time.monotonic()
        writable, self._may_write = not self._may_write, True
        holder.answer(wire.Released(writable), (self._kv_fd(writable=True),) if writable else ())

    def _let_follow(self, shadow: Peer) -> None:
        """Give an armed shadow the holder's books."""
        if self._books is not None:
            self._armed[shadow] = self._books
            shadow.answer(wire.Follow(), self._books.to_read())

    def _kv_fd(self, *, writable: bool) -> int:
        assert self._kv is not None
        return self._kv.lend(writable=writable)
