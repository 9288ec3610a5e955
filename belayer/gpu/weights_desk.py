"""Lends the weights: to one writer at a time, and to readers only when a writer has committed them.

Invariant: `ready` is said only of weights that were committed whole. A writer that dies leaves them `torn`, and only
a main that loads everything anew makes them ready again; a shadow is refused.
"""

from __future__ import annotations

from belayer.gpu import wire
from belayer.gpu.arena import Allocation, ArenaOwner
from belayer.gpu.errors import ArenaRefusedError, GeometryMismatchError, TornWeightsError
from belayer.gpu.peers import Peer


class WeightsDesk:
    """One device's weights region."""

    def __init__(self, owner: ArenaOwner) -> None:
        self._owner = owner
        self.state = wire.Weights()
        self._region: wire.Region | None = None
        self._memory: Allocation | None = None
        self.writer: Peer | None = None
        self._waiting: list[tuple[Peer, wire.OpenWeights]] = []

    def open(self, peer: Peer, request: wire.OpenWeights) -> None:
        """Lend to a reader or the first writer; while someone writes, the answer waits for the commit or the death."""
        if self.state.state == "writing":
            self._waiting.append((peer, request))
            return
        if self.state.state == "torn" and peer.role == "shadow":
            raise self.torn()
        if self._region is None:
            self._memory = self._owner.create(request.size_bytes)
            self._region = wire.Region(request.spec, request.size_bytes)
        must_be_same("weights", self._region, request.spec, request.size_bytes)
        if self.state.state != "ready" or request.anew:
            self.state = wire.Weights("writing", 0, peer.incarnation)
            self.writer = peer
        self._lend(peer)

    def begin(self, peer: Peer, version: int) -> None:
        """Lend for writing in place. The caller has checked that the peer holds the arena."""
        if self.state.state != "ready" and self.writer is not peer:
            raise self.torn()
        self.state = wire.Weights("writing", version, peer.incarnation)
        self.writer = peer
        self._lend(peer)

    def commit(self, peer: Peer, version: int) -> None:
        if self.writer is not peer:
            raise ArenaRefusedError(f"{peer.incarnation} commits weights that it did not begin")
        self.state = wire.Weights("ready", version)
        self.writer = None
        self._lend(peer)
        self._serve_the_waiting()

    def died(self, peer: Peer) -> None:
        """A process is dead; if it was writing, the weights are torn."""
        if self.writer is peer:
            self.writer = None
            self.state = wire.Weights("torn", self.state.version, peer.incarnation)
            self._serve_the_waiting()

    def torn(self) -> TornWeightsError:
        return TornWeightsError(self.state.version, self.state.writer)

    def _lend(self, peer: Peer) -> None:
        assert self._memory is not None
        writable = self.writer is peer
        fd = self._owner.export(self._memory, writable=writable)
        peer.answer(wire.WeightsLent(self._memory.size_bytes, self.state.version, writable), (fd,))

    def _serve_the_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for peer, request in waiting:
            if not peer.connected:
                continue
            try:
                self.open(peer, request)
            except (GeometryMismatchError, TornWeightsError) as error:
                peer.answer(wire.refusal(error))


def must_be_same(name: str, region: wire.Region, spec: wire.Spec, size_bytes: int) -> None:
    """GeometryMismatchError that names the first field in which they differ."""
    for field in (*region.spec, *(extra for extra in spec if extra not in region.spec)):
        if region.spec.get(field) != spec.get(field):
            raise GeometryMismatchError(name, field, region.spec.get(field), spec.get(field))
    if region.size_bytes != size_bytes:
        raise GeometryMismatchError(name, "size_bytes", region.size_bytes, size_bytes)
