"""The demo's engines: the recorded one, or a real SGLang on the CPU with a model whose words mean nothing.

With SGLang every token is computed: KV caches, batches and radix tree are real, engines start, die and are taken over
as on a GPU. What its small model says is no language, so the agent runs the recorded commands (`ForeignChat`). Equality
is of tokens that two real computations gave, one of them with failures.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from belayer.demo.chat import Chat, ForeignChat
from belayer.gpu import sglang_cpu
from belayer.gpu.memory_process import MemoryProcess
from belayer.gpu.protocol import EngineHost
from belayer.gpu.recorded_host import RecordedEngineHost
from belayer.gpu.recorded_prefix import FIRST_TEXT
from belayer.gpu.sglang_host import SglangHost

EngineName = Literal["recorded", "sglang"]
_CONTEXT_TOKENS = 1 << 14
_CACHE_TOKENS = 1 << 16
_VOCABULARY_STEP = 64
_HANG_S = 30.0
"""A prefill on a machine that other work keeps busy may be silent for long; engines are killed here, not hung."""


class Deadlines(NamedTuple):
    """What fits how long such an engine takes to start: until a main and a shadow are ready, and for a recovery."""

    ready_s: float
    recovery_s: float


class DemoEngines(NamedTuple):
    """`options` make `belayer actors` use the same engines."""

    host: EngineHost
    options: Sequence[str]
    deadlines: Deadlines


def chat_of(engine: EngineName) -> type[Chat]:
    """Who speaks in the trajectories."""
    return ForeignChat if engine == "sglang" else Chat


def make_engines(
    engine: EngineName, folder: Path, recordings: Path, chats: Sequence[Chat], tokens_per_s: float
) -> DemoEngines:
    """The engines of a run, whose folder this is. InputError when SGLang is asked for and not installed."""
    if engine == "sglang":
        return _sglang(folder, chats)
    host = RecordedEngineHost(
        recordings, folder / "engines", owner_pid=os.getpid(), tokens_per_s=tokens_per_s, silence_s=60.0
    )
    options = ["--engine", "recorded", "--recordings", str(recordings), "--tokens-per-s", str(tokens_per_s)]
    return DemoEngines(host, options, Deadlines(ready_s=120.0, recovery_s=180.0))


def _sglang(folder: Path, chats: Sequence[Chat]) -> DemoEngines:
    python = str(sglang_cpu.need_python())
    used = FIRST_TEXT + max(len(chat.tokenizer) for chat in chats)
    vocabulary = -(-used // _VOCABULARY_STEP) * _VOCABULARY_STEP
    model = sglang_cpu.write_model(folder / "model", vocabulary=vocabulary, context=_CONTEXT_TOKENS)
    arguments = sglang_cpu.arguments(model, tokens=_CACHE_TOKENS, requests=8)
    (logs := folder / "engines").mkdir()
    hang = ["--hang-s", str(_HANG_S)]
    memory = MemoryProcess("cpu", folder / "memory.sock", os.getpid(), python, logs / "memory.log", hang)
    host = SglangHost(
        None,
        arguments,
        logs,
        owner_pid=os.getpid(),
        python=python,
        environment=sglang_cpu.ENVIRONMENT,
        memory=memory,
    )
    options = ["--engine", "sglang", "--sglang-python", python, "--sglang-arguments", shlex.join(arguments)]
    options += ["--memory-socket", str(memory.socket), "--device", "cpu", *hang]
    return DemoEngines(host, options, Deadlines(ready_s=600.0, recovery_s=600.0))
