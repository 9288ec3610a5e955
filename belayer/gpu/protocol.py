"""What the rest of Belayer needs of engines. SGLang and the recorded engine both implement it, through one HTTP client.

An engine process is known by its incarnation, never by its address. It is given token ids and gives token ids; whatever
breaks its stream is an EngineFailedError, never a token.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Sampling:
    """SGLang's sampling parameters that Belayer must keep across a resume; `others` are passed on as they are."""

    max_new_tokens: int | None = 4096
    temperature: float = 0.0
    stop_token_ids: Sequence[int] = ()
    others: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Newly generated tokens, in order; the last batch of a generation has a finish reason."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    weight_version: int
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running engine process, as another process can find it."""

    incarnation: str
    host: str
    pid: int
    pid_start_ticks: int
    address: str
    """`http://host:port`."""


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """How an engine failed. `evidence` is what was seen, for a person to read.

    `gpu`: its device reports errors; the engine itself may still run.
    """

    kind: Literal["died", "hung", "gpu"]
    evidence: str


@dataclass(frozen=True, slots=True)
class Handover:
    """What a promotion took: seconds by phase, in order, as far as the host knows them; and what it saved.

    `weight_version`: that of the weights which the new main serves; None when the host does not know.
    """

    phases_s: Mapping[str, float]
    adopted_tokens: int = 0
    adopted_requests: int = 0
    weight_version: int | None = None


class Engine(Protocol):
    """A connection to one engine incarnation."""

    def generate(self, request: str, prefix: Sequence[int], sampling: Sampling) -> AsyncGenerator[TokenBatch]:
        """Stream the tokens that follow the prefix. EngineFailedError when the stream breaks before a finish reason."""
        ...

    async def close(self) -> None: ...


class EngineHost(Protocol):
    """Starts and ends engine processes on this machine."""

    async def start(self, incarnation: str, role: Literal["main", "shadow"]) -> EngineProcess:
        """Start an engine process and return once it answers. EngineFailedError when it does not in time.

        UnguardedMainError when it is to be a shadow and there is nothing that it could take over.
        """
        ...

    async def promote(self, shadow: EngineProcess, old: EngineProcess | None = None) -> Handover:
        """Make the standby the main. The old main is killed if need be and can do no harm on return.

        EngineFailedError when the standby cannot serve.
        """
        ...

    async def watch(self, engine: EngineProcess) -> EngineFailure:
        """Return once the engine has failed: at once when its process is gone already."""
        ...

    def weight_versions(self) -> AsyncGenerator[int]:
        """The version of the weights that its engines share: the present one, then each new one once it is complete.

        Ends at once when the host does not know, and when whoever tells it is gone.
        """
        ...

    async def until_idle(self, engine: EngineProcess, timeout_s: float) -> bool:
        """True once no request runs on it; False when one still does after the time."""
        ...

    async def strays(self, worker: str) -> Sequence[EngineProcess]:
        """Engines of that worker here whose starter is dead. One that the journal then does not know is nobody's."""
        ...

    async def kill(self, engine: EngineProcess) -> None:
        """SIGKILL the process and return once it is proved gone. A process that is gone already is fine."""
        ...

    def connect(self, engine: EngineProcess) -> Engine: ...
