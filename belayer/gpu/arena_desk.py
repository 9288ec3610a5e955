"""Lends the KV arena: to one holder at a time, under an epoch that only grows.

A lease is the KV memory, and this epoch's slot table and ledger; tables and ledgers come in pairs that holders use in
turn, so that a dying holder's late writes never meet the next one's.

Invariants: there is one holder. The next one is lent to once the holder's process is dead; or, when the host asked
for it, once the holder's bell has rung, and then the next one is told what it must not touch until the death
(docs/decisions say why that is safe). While that lasts nobody else is lent to.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from belayer.gpu import wire
from belayer.gpu.arena import Allocation, ArenaOwner
from belayer.gpu.errors import ArenaRefusedError, LeaseHeldError, LeaseLostError
from belayer.gpu.ledger import Ledger
from belayer.gpu.peers import Notify, Peer
from belayer.gpu.progress import HangRule, hang_evidence
from belayer.gpu.weights_desk import WeightsDesk, must_be_same


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
        self._kv: Allocation | None = None
        self._tables: list[Allocation] = []
        self._ledger_fds: list[int] = []
        self._ledgers: list[Ledger] = []
        self._fresh = True
        self.epoch = 0
        self.holder: Peer | None = None
        self._dying: Peer | None = None
        self._promotion: _Promotion | None = None
        self._arming: dict[Peer, Peer] = {}

    # --- requests -----------------------------------------------------------------------------------------------

    def open(self, peer: Peer, request: wire.OpenArena) -> None:
        """A main gets the lease now or is refused; a shadow's wish is noted."""
        size_bytes = request.kv_bytes + 2 * request.table_bytes
        if self.region is None:
            self._kv = self._owner.create(request.kv_bytes)
            self._tables = [self._owner.create(request.table_bytes) for _ in range(2)]
            rows, width = int(request.spec["table_rows"]), int(request.spec["table_width"])
            for _ in range(2):
                fd = os.memfd_create("belayer-ledger", os.MFD_CLOEXEC)
                os.ftruncate(fd, request.ledger_bytes)
                self._ledger_fds.append(fd)
                self._ledgers.append(Ledger(fd, rows, width))
            self.region = wire.Region(request.spec, size_bytes)
        must_be_same("KV arena", self.region, request.spec, size_bytes)
        peer.wants_arena = request
        if peer.role == "shadow":
            peer.answer(wire.ArenaLent(0, self._fresh))
            return
        for other in (self.holder, self._dying, self._promotion.shadow if self._promotion else None):
            if other is not None:
                raise LeaseHeldError(other.incarnation, other.pid, self.epoch)
        fds = self._lend(peer)
        peer.answer(wire.ArenaLent(self.epoch, self._fresh), fds)
        self._fresh = False

    def need_lease(self, peer: Peer) -> None:
        """LeaseLostError when the peer is not the holder."""
        if self.holder is not peer:
            raise LeaseLostError(peer.incarnation, 0, self.epoch)

    def serving(self, peer: Peer, facts: dict[str, float]) -> None:
        """The holder serves: listen to its bell, and end the promotion that made it the holder."""
        self.need_lease(peer)
        epoch, ledger = self.epoch, self._ledgers[self.epoch % 2]
        threading.Thread(
            target=lambda: (ledger.bell.wait(), self._later(self._rang, epoch)), name=f"bell-{epoch}", daemon=True
        ).start()
        promotion = self._promotion
        if promotion is not None and promotion.shadow is peer and promotion.granted_s is not None:
            self._promotion = None
            peer.role, peer.armed, peer.warm = "main", False, True
            waited_s = promotion.granted_s - promotion.began_s
            promotion.asked_by.answer(wire.Facts({"prove_s": waited_s, **facts}))

    def arm(self, asked_by: Peer, engine: Peer) -> None:
        """The engine is warm: watch the holder for hangs, arm a shadow."""
        if engine is self.holder or engine.armed:
            engine.warm = True
            asked_by.answer(wire.Facts({}))
        elif engine.wants_arena is None:
            raise ArenaRefusedError(f"{engine.incarnation} has not asked for the arena")
        else:
            self._arming[engine] = asked_by
            engine.answer(wire.ArmNow())

    def armed(self, peer: Peer, facts: dict[str, float]) -> None:
        asked_by = self._arming.pop(peer, None)
        if asked_by is None:
            raise ArenaRefusedError(f"{peer.incarnation} is armed and nobody asked for it")
        peer.armed = True
        asked_by.answer(wire.Facts(facts))

    def promote(self, asked_by: Peer, request: wire.Promote, shadow: Peer) -> None:
        """Begin a promotion; the answer comes when the shadow serves."""
        if shadow is self.holder:
            asked_by.answer(wire.Facts({}))
            return
        if self._weights.state.state != "ready" and self._weights.writer is not self.holder:
            raise self._weights.torn()
        if not shadow.armed:
            raise ArenaRefusedError(f"{request.incarnation} is not armed; arm it first")
        if self._promotion is not None:
            raise ArenaRefusedError(f"{self._promotion.request.incarnation} is being promoted")
        if self.holder is not None and self.holder.alive and not self.holder.dying:
            if not request.kill_old:
                raise LeaseHeldError(self.holder.incarnation, self.holder.pid, self.epoch)
            self.holder.kill()
        self._promotion = _Promotion(asked_by, request, shadow)
        self._advance()

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
        if peer in (self.holder, self._dying):
            self._is_dying(peer)
            self._notify(wire.EngineEvent("dead", peer.incarnation, f"process {peer.pid} ended"))
        if self.holder is peer:
            self.holder = None
        if self._dying is peer:
            self._dying = None
            if self.holder is not None:
                self.holder.answer(wire.Released())
        promotion = self._promotion
        if promotion is not None and promotion.shadow is peer:
            self._give_up(promotion, f"{peer.incarnation} died while it was promoted")
        self._advance()

    def tick(self) -> None:
        """Deadlines: of the promotion, and of the holder's silence."""
        promotion, holder = self._promotion, self.holder
        if promotion is not None and time.monotonic() - promotion.began_s > promotion.request.timeout_s:
            phase = "adopt" if promotion.granted_s is not None else "see its predecessor die"
            self._give_up(promotion, f"{promotion.shadow.incarnation} did not {phase} in time")
        if holder is not None and holder.alive and holder.warm and not holder.dying:
            progress = self._ledgers[self.epoch % 2].progress()
            if evidence := hang_evidence(progress, self.epoch, holder.pid, self._rule):
                self._notify(wire.EngineEvent("hung", holder.incarnation, evidence))
                holder.warm = False
                holder.kill()

    def _give_up(self, promotion: _Promotion, cause: str) -> None:
        self._promotion = None
        promotion.asked_by.answer(wire.refusal(ArenaRefusedError(cause)))

    def _advance(self) -> None:
        """Lend to the shadow that is being promoted, as soon as that is safe."""
        promotion = self._promotion
        if promotion is None or promotion.granted_s is not None or self._dying is not None:
            return
        holder = self.holder
        if holder is not None and not (promotion.request.early and holder.dying):
            return
        if self._weights.state.state != "ready":
            if self._weights.state.state == "torn":
                self._promotion = None
                promotion.asked_by.answer(wire.refusal(self._weights.torn()))
            return
        self._dying, self.holder = holder, None
        fds = self._lend(promotion.shadow)
        promotion.granted_s = time.monotonic()
        promotion.shadow.answer(wire.Granted(self.epoch, promotion.request.adopt, holder is not None), fds)

    def _lend(self, peer: Peer) -> tuple[int, ...]:
        """The lease under a new epoch, as descriptors. The caller has seen to it that nobody holds it."""
        assert self.holder is None and self._kv is not None
        if not peer.alive:
            raise ArenaRefusedError(f"{peer.incarnation} (pid {peer.pid}) is dead")
        self.epoch += 1
        self.holder = peer
        mine, last = self.epoch % 2, (self.epoch + 1) % 2
        return (
            self._owner.export(self._kv, writable=True),
            self._owner.export(self._tables[mine], writable=True),
            os.dup(self._ledger_fds[mine]),
            self._owner.export(self._tables[last], writable=False),
            os.open(f"/proc/self/fd/{self._ledger_fds[last]}", os.O_RDONLY | os.O_CLOEXEC),
        )
