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


class Engine(Protocol):
    """A connection to one engine incarnation."""

    def generate(self, request: str, prefix: Sequence[int], sampling: Sampling) -> AsyncGenerator[TokenBatch]:
        """Stream the tokens that follow the prefix. EngineFailedError when the stream breaks before a finish reason."""
        ...

    async def close(self) -> None: ...


class EngineHost(Protocol):
    """Starts and ends engine processes on this machine."""

    async def start(self, incarnation: str, role: Literal["main", "shadow"]) -> EngineProcess:
        """Start an engine process and return once it answers. EngineFailedError when it does not in time."""
        ...

    async def promote(self, shadow: EngineProcess) -> None:
        """Make the standby the main, after the old main is proved dead."""
        ...

    async def kill(self, engine: EngineProcess) -> None:
        """SIGKILL the process and return once it is proved gone. A process that is gone already is fine."""
        ...

    def connect(self, engine: EngineProcess) -> Engine: ...
