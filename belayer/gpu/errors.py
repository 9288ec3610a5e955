"""Errors of the memory server and the engines' plugin; each says what to do and carries its facts as fields."""

from __future__ import annotations

from belayer.errors import BelayerError


class ArenaError(BelayerError):
    """The root of the GPU arena's errors."""


class GeometryMismatchError(ArenaError):
    """An engine wants memory of another shape than the server has."""

    def __init__(self, region: str, field: str, server: object, engine: object) -> None:
        super().__init__(
            f"{region}: the memory server has {field}={server}, the engine wants {field}={engine}; "
            "start the engine with the options of the one that came first, or restart the memory server"
        )
        self.region = region
        self.field = field
        self.server = server
        self.engine = engine


class LeaseHeldError(ArenaError):
    """The KV arena is lent to a process that is not proved dead."""

    def __init__(self, holder: str, pid: int, epoch: int) -> None:
        super().__init__(
            f"the KV arena is lent to {holder} (pid {pid}, epoch {epoch}), which is alive; "
            "kill it first, or promote with kill_old"
        )
        self.holder = holder
        self.pid = pid
        self.epoch = epoch


class LeaseLostError(ArenaError):
    """The caller's lease is not the current one: it must stop, whatever it was doing."""

    def __init__(self, incarnation: str, epoch: int, current_epoch: int) -> None:
        super().__init__(
            f"{incarnation} acts under lease epoch {epoch}, but the current one is {current_epoch}; it must stop"
        )
        self.incarnation = incarnation
        self.epoch = epoch
        self.current_epoch = current_epoch


class TornWeightsError(ArenaError):
    """The weights were being written when their writer died, or they still are: they are never served."""

    def __init__(self, version: int, writer: str) -> None:
        super().__init__(
            f"the weights are torn: {writer} began version {version} and did not commit it; "
            "start a main, which loads them anew, then publish the current version"
        )
        self.version = version
        self.writer = writer


class DeviceUnhealthyError(ArenaError):
    """The GPU reported an error; nothing new is lent on it."""

    def __init__(self, evidence: str) -> None:
        super().__init__(f"the device is not healthy: {evidence}; move its requests to another engine")
        self.evidence = evidence


class ArenaRefusedError(ArenaError):
    """The memory server refused for another reason (not our user, an unknown engine, a wrong order of calls)."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"the memory server refused: {cause}")
        self.cause = cause


class MemoryServerGoneError(ArenaError):
    """The memory server does not answer."""

    def __init__(self, socket_path: str, cause: str) -> None:
        super().__init__(f"no answer from the memory server at {socket_path} ({cause}); is `belayer memory` up?")
        self.socket_path = socket_path
        self.cause = cause


class DeviceCallError(ArenaError):
    """A call of the operating system or the CUDA driver on arena memory failed."""

    def __init__(self, call: str, cause: str) -> None:
        super().__init__(f"{call} failed: {cause}")
        self.call = call
        self.cause = cause


class UnsupportedEngineError(ArenaError):
    """This SGLang, or this model's KV cache, is not one that the plugin knows."""

    def __init__(self, what: str, found: str, known: str) -> None:
        super().__init__(f"{what} is {found}; Belayer's plugin knows {known}")
        self.what = what
        self.found = found
        self.known = known
