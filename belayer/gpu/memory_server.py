"""The memory server: owns one device's weights and KV arena, lends them to engines, and outlives every one of them.

One thread and one selector: every message, death and deadline is handled whole before the next. It runs no kernel.
The device's health is asked all the time: once it is bad, nothing is lent, and who watches is told of the engine that
holds the arena.
When the server itself dies, engines keep what they have mapped and go on; nothing can be promoted or published until
a new server is up, whose engines start anew.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from belayer.gpu import wire
from belayer.gpu.arena import ArenaOwner, open_owner
from belayer.gpu.arena_desk import ArenaDesk
from belayer.gpu.errors import ArenaError, ArenaRefusedError, DeviceUnhealthyError
from belayer.gpu.peers import Peer
from belayer.gpu.progress import HangRule
from belayer.gpu.weights_desk import WeightsDesk
from belayer.processes import open_pidfd, start_ticks

_TICK_S = 0.05
_HEALTH_EVERY_S = 0.5


class MemoryServer:
    """Serves one device on one Unix socket until `stop`. `health` says why the device is unfit, or ""."""

    def __init__(
        self,
        device: str,
        socket_path: Path,
        *,
        owner: ArenaOwner | None = None,
        health: Callable[[], str] = lambda: "",
        hang_rule: HangRule | None = None,
    ) -> None:
        owner = owner or open_owner(device)
        self.device = device
        self._path = socket_path
        self._health = health
        self._unhealthy = ""
        self._suspicion = ""
        """Evidence of the last look; it counts when seen twice: one silence may be this server's own, when stopped."""
        self._looked_s = 0.0
        self._unfit: Peer | None = None
        """The holder that watchers have been told of as being on a bad device."""
        self._peers: dict[int, Peer] = {}
        self._weights = WeightsDesk(owner)
        self._arena = ArenaDesk(owner, self._weights, hang_rule or HangRule(), self._notify, self._later)
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stopped = False
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    # --- the loop -----------------------------------------------------------------------------------------------

    def serve(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`; blocks. The socket is our user's alone. `ready` is called once it is there."""
        self._path.unlink(missing_ok=True)
        mask = os.umask(0o177)
        try:
            self._listener.bind(str(self._path))
        finally:
            os.umask(mask)
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
        ready()
        while not self._stopped:
            for key, _ in self._selector.select(_TICK_S):
                key.data()
            self._arena.tick()
            self._look_at_health()
        for peer in list(self._peers.values()):
            peer.connection.close()
        self._path.unlink(missing_ok=True)
        self._listener.close()
        self._selector.close()

    def stop(self) -> None:
        """End `serve`. Safe from another thread and from a signal handler."""
        self._stopped = True
        self._wake()

    def _later(self, function: Callable[..., None], *arguments: Any) -> None:
        self._calls.append((function, arguments))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def _woken(self) -> None:
        os.read(self._wake_read, 4096)
        while self._calls:
            function, arguments = self._calls.popleft()
            function(*arguments)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        peer = Peer(connection, pid, open_pidfd(pid, start_ticks(pid)))
        if uid not in (os.getuid(), 0):
            peer.answer(wire.refusal(ArenaRefusedError(f"user {uid} is not ours")))
            connection.close()
            return
        self._peers[connection.fileno()] = peer
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._receive(peer))
        if peer.pidfd is not None:
            self._selector.register(peer.pidfd, selectors.EVENT_READ, lambda: self._died(peer))

    def _receive(self, peer: Peer) -> None:
        try:
            request = wire.receive_request(peer.connection)
        except msgspec.DecodeError as error:
            peer.answer(wire.refusal(ArenaRefusedError(f"not a message of ours: {error}")))
            return
        if request is None:
            self._disconnected(peer)
            return
        try:
            self._handle(peer, request)
        except ArenaError as error:
            peer.answer(wire.refusal(error))

    def _disconnected(self, peer: Peer) -> None:
        """The connection ended. An engine keeps what it was lent until it is dead."""
        fd = peer.connection.fileno()
        self._selector.unregister(peer.connection)
        del self._peers[fd]
        peer.connection.close()
        peer.armed = False
        if peer.role == "control":
            self._forget_process(peer)

    def _died(self, peer: Peer) -> None:
        self._forget_process(peer)
        self._weights.died(peer)
        self._arena.died(peer)

    def _forget_process(self, peer: Peer) -> None:
        if peer.pidfd is not None:
            self._selector.unregister(peer.pidfd)
            os.close(peer.pidfd)
            peer.pidfd = None

    def _notify(self, event: wire.EngineEvent) -> None:
        for peer in self._peers.values():
            if peer.watches:
                peer.answer(event)

    def _say_weights(self, peer: Peer) -> None:
        if peer.watches_weights and self._weights.state.state == "ready":
            peer.answer(wire.WeightsEvent(self._weights.state.version))

    # --- requests -----------------------------------------------------------------------------------------------

    def _handle(self, peer: Peer, request: wire.Request) -> None:
        match request:
            case wire.Register():
                peer.incarnation, peer.role = request.incarnation, request.role
                peer.answer(wire.Registered(self._weights.state, self._arena.region))
            case wire.OpenWeights():
                self._refuse_when_unhealthy()
                if request.anew:
                    self._arena.need_nobody()
                self._weights.open(peer, request)
            case wire.BeginWeights():
                self._arena.need_lease(peer)
                self._weights.begin(peer, request.version)
            case wire.CommitWeights():
                self._weights.commit(peer, request.version)
                for watcher in self._peers.values():
                    self._say_weights(watcher)
            case wire.OpenArena():
                self._refuse_when_unhealthy()
                self._arena.open(peer, request)
            case wire.Serving():
                self._arena.serving(peer, request.facts)
            case wire.Armed():
                self._arena.armed(peer, request.facts)
            case wire.Arm():
                self._arena.arm(peer, self._engine(request.incarnation))
            case wire.Promote():
                self._refuse_when_unhealthy()
                self._arena.promote(peer, request, self._engine(request.incarnation))
            case wire.Watch():
                peer.watches = True
                peer.answer(wire.Facts({}))
                if self._unfit is not None:
                    peer.answer(wire.EngineEvent("unfit", self._unfit.incarnation, self._unhealthy))
            case wire.WatchWeights():
                peer.watches_weights = True
                peer.answer(wire.Facts({}))
                self._say_weights(peer)
            case wire.AskStatus():
                peer.answer(self.status())

    def _engine(self, incarnation: str) -> Peer:
        for peer in self._peers.values():
            if peer.incarnation == incarnation and peer.role != "control":
                return peer
        raise ArenaRefusedError(f"no engine {incarnation} is connected")

    def _refuse_when_unhealthy(self) -> None:
        self._unhealthy = self._unhealthy or self._health()
        if self._unhealthy:
            raise DeviceUnhealthyError(self._unhealthy)

    def _look_at_health(self) -> None:
        """Tell of the holder once the device is unhealthy, and of each that comes after it."""
        now_s = time.monotonic()
        if not self._unhealthy and now_s - self._looked_s > _HEALTH_EVERY_S:
            self._looked_s = now_s
            before, self._suspicion = self._suspicion, self._health()
            self._unhealthy = self._suspicion if before else ""
        holder = self._arena.holder
        if self._unhealthy and holder is not None and holder is not self._unfit:
            self._unfit = holder
            self._notify(wire.EngineEvent("unfit", holder.incarnation, self._unhealthy))

    def status(self) -> wire.Status:
        """What is owned and lent, as of now."""
        holder = self._arena.holder
        return wire.Status(
            self.device,
            self._arena.epoch,
            holder.incarnation if holder else "",
            self._weights.state,
            self._arena.region,
            [
                wire.EngineStatus(peer.incarnation, peer.pid, peer.role, peer.armed, peer is holder)
                for peer in self._peers.values()
                if peer.role != "control"
            ],
            self._unhealthy,
        )
