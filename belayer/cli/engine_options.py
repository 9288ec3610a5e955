"""The options that say which engines a host runs, shared by the verbs that start some, and the EngineHost they make."""

from __future__ import annotations

import enum
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from belayer.errors import InputError

if TYPE_CHECKING:
    from belayer.gpu.protocol import EngineHost

DEFAULT_HANG_S = 2.5
DEFAULT_UPDATE_S = 300.0
SGLANG_PATIENCE_S = 900.0
"""How long the start of an SGLang engine may take before another actor tries: large models load for minutes."""
_RECORDED_PATIENCE_S = 20.0


class Kind(enum.StrEnum):
    """Which engine."""

    RECORDED = "recorded"
    SGLANG = "sglang"


class When(enum.StrEnum):
    """When a shadow may take over: once the dead engine's process is gone, or once its scheduler is."""

    LATE = "late"
    EARLY = "early"


class Adoption(enum.StrEnum):
    """Whether a shadow adopts the dead engine's KV cache."""

    ON = "on"
    OFF = "off"


EngineOption = Annotated[
    Kind, typer.Option("--engine", envvar="BELAYER_ENGINE", help="The recorded engine, or SGLang.")
]
Recordings = Annotated[
    Path | None, typer.Option(help="Recorded engine: folder of its token recordings.", exists=True, file_okay=False)
]
EngineLog = Annotated[Path, typer.Option(help="Folder for the engines' logs.")]
TokensPerS = Annotated[float, typer.Option(help="Recorded engine: how fast it generates.", min=0.1)]
SglangPython = Annotated[
    Path | None,
    typer.Option(
        envvar="BELAYER_SGLANG_PYTHON", help="SGLang: the interpreter that has it.", show_default=".venv-sglang's"
    ),
]
SglangArguments = Annotated[
    str,
    typer.Option(
        envvar="BELAYER_SGLANG_ARGUMENTS", help="SGLang: its own arguments, as a shell has them (--model-path ...)."
    ),
]
MemorySocket = Annotated[
    Path | None, typer.Option(envvar="BELAYER_MEMORY_SOCKET", help="The device's memory server: its Unix socket.")
]
Device = Annotated[str, typer.Option(envvar="BELAYER_DEVICE", help="The device: cpu or cuda:N.")]
HangS = Annotated[
    float, typer.Option(help="SGLang: an idle or decoding scheduler that is silent for so long is hung.", min=0.1)
]
UpdateS = Annotated[
    float,
    typer.Option(
        envvar="BELAYER_UPDATE_S",
        help="SGLang: a weight update of which nothing is heard for so long, in a call or between two, is given up.",
        min=0.1,
    ),
]
Handover = Annotated[
    When, typer.Option(envvar="BELAYER_HANDOVER", help="SGLang: when a shadow may take over (decision 7).")
]
Adopt = Annotated[
    Adoption, typer.Option(envvar="BELAYER_ADOPTION", help="SGLang: whether a shadow adopts the KV cache.")
]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a person chose."""

    engine: Kind
    log: Path
    recordings: Path | None = None
    tokens_per_s: float = 400.0
    python: Path | None = None
    arguments: str = ""
    memory_socket: Path | None = None
    device: str = "cpu"
    handover: When = When.LATE
    adopt: Adoption = Adoption.ON
    hang_s: float = DEFAULT_HANG_S
    update_s: float = DEFAULT_UPDATE_S

    @property
    def patience_s(self) -> float:
        """How long an engine may take to start."""
        return SGLANG_PATIENCE_S if self.engine is Kind.SGLANG else _RECORDED_PATIENCE_S

    def host(self, owner_pid: int) -> EngineHost:
        """The host. InputError for an option that is missing or that nobody could use."""
        match self.engine:
            case Kind.RECORDED:
                return self._recorded(owner_pid)
            case Kind.SGLANG:
                return self._sglang(owner_pid)

    def _recorded(self, owner_pid: int) -> EngineHost:
        from belayer.gpu.recorded_host import RecordedEngineHost

        if self.recordings is None:
            raise InputError("the recorded engine needs --recordings, the folder of its token recordings")
        return RecordedEngineHost(self.recordings, self.log, owner_pid=owner_pid, tokens_per_s=self.tokens_per_s)

    def _sglang(self, owner_pid: int) -> EngineHost:
        from belayer.gpu import sglang_cpu
        from belayer.gpu.arena import device_index
        from belayer.gpu.memory_process import MemoryProcess
        from belayer.gpu.progress import HangRule
        from belayer.gpu.sglang_host import SglangHost

        if not self.arguments:
            raise InputError("SGLang needs --sglang-arguments (--model-path and whatever else it is started with)")
        if self.memory_socket is None:
            raise InputError("SGLang needs --memory-socket, where its device's memory server listens or is to listen")
        if self.device != "cpu":
            device_index(self.device)
        try:
            arguments = shlex.split(self.arguments)
        except ValueError as error:
            raise InputError(f"--sglang-arguments is not as a shell would have it: {error}") from None
        python = str(self.python or sglang_cpu.need_python())
        environment = sglang_cpu.ENVIRONMENT if self.device == "cpu" else {}
        self.log.mkdir(parents=True, exist_ok=True)
        hang = ("--hang-s", str(self.hang_s), "--update-s", str(self.update_s))
        memory = MemoryProcess(self.device, self.memory_socket, owner_pid, python, self.log / "memory.log", hang)
        return SglangHost(
            None,
            arguments,
            self.log,
            owner_pid=owner_pid,
            python=python,
            environment=environment,
            silence_s=HangRule(self.hang_s, update_s=self.update_s).callers_s,
            adopt=self.adopt is Adoption.ON,
            early=self.handover is When.EARLY,
            memory=memory,
        )
