"""The memory server: owns one device's weights and KV arena, lends them to engines, and outlives every one of them.

Invariants: the KV arena is lent for writing to one process at a time, under an epoch that only grows, and to the
next only once the process before is proved dead (its pidfd) and the device is healthy. Weights are `ready` or they
are not lent for reading: a writer that dies before its commit leaves them torn. It never runs a kernel.

One thread and one selector: every message, death and deadline is handled whole before the next. When the server
itself dies, engines keep what they have mapped and finish; nothing can be promoted until a new server is up.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from belayer.gpu import wire
from belayer.gpu.arena import Allocation, ArenaOwner, open_owner
from belayer.gpu.errors import (
    ArenaError,
    ArenaRefusedError,
    DeviceUnhealthyError,
    GeometryMismatchError,
    LeaseHeldError,
    LeaseLostError,
    TornWeightsError,
)
from belayer.gpu.ledger import Ledger
from belayer.gpu.progress import HangRule, hang_evidence
from belayer.processes import open_pidfd, start_ticks

_TICK_S = 0.05


class _Engine:
    """One connection, and the process behind it."""

    def __init__(self, connection: socket.socket, pid: int, pidfd: int | None) -> None:
        self.connection = connection
        self.pid = pid
        self.pidfd = pidfd
        self.incarnation = ""
        self.role: wire.Role = "control"
        self.wants_arena: wire.OpenArena | None = None
        self.armed = False
        self.watched = False

    @property
    def alive(self) -> bool:
        return self.pidfd is not None


class _Promotion:
    """A promotion under way, from the host's request until the shadow serves."""

    def __init__(self, asked_by: _Engine, request: wire.Promote, shadow: _Engine) -> None:
        self.asked_by = asked_by
        self.request = request
        self.shadow = shadow
        self.began_s = time.monotonic()
        self.granted_s: float | None = None

    @property
    def overdue(self) -> bool:
        return time.monotonic() - self.began_s > self.request.timeout_s


class MemoryServer:
    """Serves one device on one Unix socket until `stop`."""

    def __init__(
        self,
        device: str,
        socket_path: Path,
        *,
        owner: ArenaOwner | None = None,
        health: Callable[[], str] = lambda: "",
        hang_rule: HangRule | None = None,
    ) -> None:
        self.device = device
        self._path = socket_path
        self._owner = owner or open_owner(device)
        self._health = health
        self._hang_rule = hang_rule or HangRule()
        self._selector = selectors.DefaultSelector()
        self._engines: dict[int, _Engine] = {}
        self._weights = wire.Weights()
        self._weights_region: wire.Region | None = None
        self._weights_memory: Allocation | None = None
        self._weights_writer: _Engine | None = None
        self._waiting_for_weights: list[tuple[_Engine, wire.OpenWeights]] = []
        self._arena_region: wire.Region | None = None
        self._arena_memory: Allocation | None = None
        self._ledger_fd = -1
        self._ledger: Ledger | None = None
        self._fresh = True
        self._epoch = 0
        self._holder: _Engine | None = None
        self._promotion: _Promotion | None = None
        self._arming: dict[int, _Engine] = {}
        self._unhealthy = ""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stopped = False
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
        self._selector.register(self._wake_read, selectors.EVENT_READ, lambda: None)
        ready()
        while not self._stopped:
            for key, _ in self._selector.select(_TICK_S):
                key.data()
            self._tick()
        self._close()

    def stop(self) -> None:
        """End `serve`. Safe from another thread and from a signal handler."""
        self._stopped = True
        os.write(self._wake_write, b"x")

    def _close(self) -> None:
        for engine in list(self._engines.values()):
            self._selector.unregister(engine.connection)
            engine.connection.close()
        self._path.unlink(missing_ok=True)
        self._listener.close()

    def _tick(self) -> None:
        promotion = self._promotion
        if promotion is not None and promotion.overdue:
            phase = "adopt" if promotion.granted_s is not None else "see its predecessor die"
            self._promotion = None
            cause = f"{promotion.request.incarnation} did not {phase} within {promotion.request.timeout_s:.1f} s"
            self._answer(promotion.asked_by, wire.refusal(ArenaRefusedError(cause)))
        holder = self._holder
        if holder is not None and holder.pidfd is not None and holder.watched and self._ledger is not None:
            evidence = hang_evidence(self._ledger.progress(), self._epoch, holder.pid, self._hang_rule)
            if evidence:
                _kill(holder.pidfd)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (os.getuid(), 0):
            with contextlib.suppress(OSError):
                wire.send(connection, wire.refusal(ArenaRefusedError(f"user {uid} is not ours")))
            connection.close()
            return
        engine = _Engine(connection, pid, open_pidfd(pid, start_ticks(pid)))
        self._engines[connection.fileno()] = engine
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._receive(engine))
        if engine.pidfd is not None:
            self._selector.register(engine.pidfd, selectors.EVENT_READ, lambda: self._died(engine))

    def _receive(self, engine: _Engine) -> None:
        try:
            request = wire.receive_request(engine.connection)
        except msgspec.DecodeError as error:
            self._answer(engine, wire.refusal(ArenaRefusedError(f"not a message of ours: {error}")))
            return
        if request is None:
            self._disconnected(engine)
            return
        self._guarded(engine, request)

    def _guarded(self, engine: _Engine, request: wire.Request) -> None:
        try:
            self._handle(engine, request)
        except ArenaError as error:
            self._answer(engine, wire.refusal(error))

    def _disconnected(self, engine: _Engine) -> None:
        """The connection ended. A process that holds something keeps it until it is dead."""
        fd = engine.connection.fileno()
        self._selector.unregister(engine.connection)
        self._engines.pop(fd, None)
        self._arming.pop(fd, None)
        engine.connection.close()
        engine.armed = False
        if engine is not self._holder and engine is not self._weights_writer:
            self._forget_pid(engine)

    def _died(self, engine: _Engine) -> None:
        self._forget_pid(engine)
        if self._weights_writer is engine:
            self._weights_writer = None
            self._weights = wire.Weights("torn", self._weights.version, engine.incarnation)
            self._open_weights_for_the_waiting()
        if self._holder is engine:
            self._holder = None
        promotion = self._promotion
        if promotion is not None and promotion.shadow is engine:
            self._promotion = None
            cause = f"{engine.incarnation} died while it was promoted"
            self._answer(promotion.asked_by, wire.refusal(ArenaRefusedError(cause)))
        self._advance_promotion()

    def _forget_pid(self, engine: _Engine) -> None:
        if engine.pidfd is not None:
            self._selector.unregister(engine.pidfd)
            os.close(engine.pidfd)
            engine.pidfd = None

    def _answer(self, engine: _Engine, message: wire.Answer, fds: tuple[int, ...] = ()) -> None:
        """Send, then close the descriptors. A receiver that is gone is noticed by its pidfd."""
        try:
            if engine.connection.fileno() >= 0:
                wire.send(engine.connection, message, fds)
        except OSError:
            pass
        finally:
            for fd in fds:
                os.close(fd)

    # --- requests -----------------------------------------------------------------------------------------------

    def _handle(self, engine: _Engine, request: wire.Request) -> None:
        match request:
            case wire.Register():
                engine.incarnation, engine.role = request.incarnation, request.role
                self._answer(engine, wire.Registered(self._weights, self._arena_region))
            case wire.OpenWeights():
                self._open_weights(engine, request)
            case wire.BeginWeights():
                self._begin_weights(engine, request.version)
            case wire.CommitWeights():
                self._commit_weights(engine, request.version)
            case wire.OpenArena():
                self._open_arena(engine, request)
            case wire.Arm():
                self._arm(engine, request.incarnation)
            case wire.Promote():
                self._promote(engine, request)
            case wire.Done():
                self._done(engine, request.facts)
            case wire.AskStatus():
                self._answer(engine, self.status())

    def _open_weights(self, engine: _Engine, request: wire.OpenWeights) -> None:
        if self._weights.state == "writing":
            self._waiting_for_weights.append((engine, request))
            return
        if self._weights_region is None:
            self._weights_memory = self._owner.create(request.size_bytes)
            self._weights_region = wire.Region(request.spec, request.size_bytes)
        _same("weights", self._weights_region, request.spec, request.size_bytes)
        writable = self._weights.state != "ready"
        if writable:
            self._refuse_when_unhealthy()
            self._weights = wire.Weights("writing", 0, engine.incarnation)
            self._weights_writer = engine
        self._lend_weights(engine, writable)

    def _begin_weights(self, engine: _Engine, version: int) -> None:
        self._need_lease(engine)
        if self._weights.state != "ready" and self._weights_writer is not engine:
            raise TornWeightsError(self._weights.version, self._weights.writer)
        self._weights = wire.Weights("writing", version, engine.incarnation)
        self._weights_writer = engine
        self._lend_weights(engine, True)

    def _commit_weights(self, engine: _Engine, version: int) -> None:
        if self._weights_writer is not engine:
            raise ArenaRefusedError(f"{engine.incarnation} commits weights that it did not begin")
        self._weights = wire.Weights("ready", version)
        self._weights_writer = None
        self._lend_weights(engine, False)
        self._open_weights_for_the_waiting()

    def _open_weights_for_the_waiting(self) -> None:
        waiting, self._waiting_for_weights = self._waiting_for_weights, []
        for engine, request in waiting:
            if engine.connection.fileno() >= 0:
                self._guarded(engine, request)

    def _lend_weights(self, engine: _Engine, writable: bool) -> None:
        assert self._weights_memory is not None
        fd = self._owner.export(self._weights_memory, writable=writable)
        size_bytes = self._weights_memory.size_bytes
        self._answer(engine, wire.WeightsLent(size_bytes, self._weights.version, writable), (fd,))

    def _open_arena(self, engine: _Engine, request: wire.OpenArena) -> None:
        self._refuse_when_unhealthy()
        if self._arena_region is None:
            self._arena_memory = self._owner.create(request.size_bytes)
            self._arena_region = wire.Region(request.spec, request.size_bytes)
            self._ledger_fd = os.memfd_create("belayer-ledger", os.MFD_CLOEXEC)
            os.ftruncate(self._ledger_fd, request.ledger_bytes)
        _same("KV arena", self._arena_region, request.spec, request.size_bytes)
        engine.wants_arena = request
        if engine.role == "shadow":
            self._answer(engine, wire.ArenaLent(0, self._fresh))
            return
        if self._holder is not None:
            raise LeaseHeldError(self._holder.incarnation, self._holder.pid, self._epoch)
        if self._promotion is not None:
            raise LeaseHeldError(self._promotion.request.incarnation, self._promotion.shadow.pid, self._epoch)
        fds = self._lend_arena(engine)
        self._answer(engine, wire.ArenaLent(self._epoch, self._fresh), fds)
        self._fresh = False

    def _lend_arena(self, engine: _Engine) -> tuple[int, int]:
        """Give the lease under a new epoch. The caller has seen to it that nobody holds it."""
        assert self._holder is None and self._arena_memory is not None and engine.wants_arena is not None
        if engine.pidfd is None:
            raise ArenaRefusedError(f"{engine.incarnation} (pid {engine.pid}) is dead")
        if self._ledger is None:
            spec = engine.wants_arena.spec
            self._ledger = Ledger(self._ledger_fd, int(spec["table_rows"]), int(spec["table_width"]))
        self._epoch += 1
        self._holder = engine
        return self._owner.export(self._arena_memory, writable=True), os.dup(self._ledger_fd)

    def _arm(self, asked_by: _Engine, incarnation: str) -> None:
        if self._holder is not None and self._holder.incarnation == incarnation:
            self._holder.watched = True
            self._answer(asked_by, wire.Facts({}))
            return
        shadow = self._shadow(incarnation)
        if shadow.armed:
            self._answer(asked_by, wire.Facts({}))
            return
        self._arming[shadow.connection.fileno()] = asked_by
        self._answer(shadow, wire.ArmNow())

    def _promote(self, asked_by: _Engine, request: wire.Promote) -> None:
        if self._holder is not None and self._holder.incarnation == request.incarnation:
            self._answer(asked_by, wire.Facts({}))
            return
        shadow = self._shadow(request.incarnation)
        self._refuse_when_unhealthy()
        if self._weights.state != "ready" and self._weights_writer is not self._holder:
            raise TornWeightsError(self._weights.version, self._weights.writer)
        if not shadow.armed:
            raise ArenaRefusedError(f"{request.incarnation} is not armed; arm it first")
        if self._promotion is not None:
            raise ArenaRefusedError(f"{self._promotion.request.incarnation} is being promoted")
        if self._holder is not None and self._holder.pidfd is not None:
            if not request.kill_old:
                raise LeaseHeldError(self._holder.incarnation, self._holder.pid, self._epoch)
            _kill(self._holder.pidfd)
        self._promotion = _Promotion(asked_by, request, shadow)
        self._advance_promotion()

    def _advance_promotion(self) -> None:
        """Lend to the shadow that is being promoted as soon as nobody holds the arena."""
        promotion = self._promotion
        if promotion is None or self._holder is not None or promotion.granted_s is not None:
            return
        if self._weights.state != "ready":
            self._promotion = None
            error = TornWeightsError(self._weights.version, self._weights.writer)
            self._answer(promotion.asked_by, wire.refusal(error))
            return
        fds = self._lend_arena(promotion.shadow)
        promotion.granted_s = time.monotonic()
        self._answer(promotion.shadow, wire.Granted(self._epoch, promotion.request.adopt), fds)

    def _done(self, engine: _Engine, facts: dict[str, float]) -> None:
        promotion = self._promotion
        if promotion is not None and promotion.shadow is engine and promotion.granted_s is not None:
            self._promotion = None
            engine.role, engine.armed, engine.watched = "main", False, True
            waited_s = promotion.granted_s - promotion.began_s
            self._answer(promotion.asked_by, wire.Facts({"prove_dead_s": waited_s, **facts}))
            return
        asked_by = self._arming.pop(engine.connection.fileno(), None)
        if asked_by is None:
            raise ArenaRefusedError(f"{engine.incarnation} is done with what nobody asked for")
        engine.armed = True
        self._answer(asked_by, wire.Facts(facts))

    # --- rules --------------------------------------------------------------------------------------------------

    def _shadow(self, incarnation: str) -> _Engine:
        for engine in self._engines.values():
            if engine.incarnation == incarnation and engine.role == "shadow" and engine.wants_arena is not None:
                return engine
        raise ArenaRefusedError(f"no shadow {incarnation} is connected")

    def _need_lease(self, engine: _Engine) -> None:
        if self._holder is not engine:
            raise LeaseLostError(engine.incarnation, 0, self._epoch)

    def _refuse_when_unhealthy(self) -> None:
        self._unhealthy = self._unhealthy or self._health()
        if self._unhealthy:
            raise DeviceUnhealthyError(self._unhealthy)

    def status(self) -> wire.Status:
        """What is owned and lent, as of now."""
        holder = self._holder
        return wire.Status(
            self.device,
            self._epoch,
            holder.incarnation if holder else "",
            holder is not None and holder.alive,
            self._weights,
            self._arena_region,
            [
                wire.EngineStatus(e.incarnation, e.pid, e.role, e.armed, e is holder)
                for e in self._engines.values()
                if e.role != "control"
            ],
            self._unhealthy,
        )


def _same(name: str, region: wire.Region, spec: dict[str, int | str], size_bytes: int) -> None:
    for field in (*region.spec, *(extra for extra in spec if extra not in region.spec)):
        if region.spec.get(field) != spec.get(field):
            raise GeometryMismatchError(name, field, region.spec.get(field), spec.get(field))
    if region.size_bytes != size_bytes:
        raise GeometryMismatchError(name, "size_bytes", region.size_bytes, size_bytes)


def _kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
