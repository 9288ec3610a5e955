"""A real model's text goes on across a kill: `python -m benchmarks.readable MODEL-FOLDER` (see benchmarks.smollm2).

SGLang on the CPU: the text is generated undisturbed, then again with the engine killed in the middle of it. Prints
both halves with a mark where the engine died, and whether the text is the same. Exits with 1 when it is not.
"""

# tokenizers is among SGLang's packages, not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path

from belayer.errors import EngineFailedError
from belayer.gpu.memory_process import MemoryProcess
from belayer.gpu.protocol import EngineProcess, Sampling
from belayer.gpu.sglang_cpu import ENVIRONMENT, arguments
from belayer.gpu.sglang_host import SglangHost
from benchmarks.sglang_shapes import write_plugins

ROOT = Path(__file__).resolve().parent.parent
_PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


async def generate(
    host: SglangHost, engine: EngineProcess, name: str, prompt: list[int], have: list[int], limit: int, old: str = ""
) -> None:
    """Add the engine's tokens to `have`; a stream that breaks leaves what has come."""
    client = host.connect(engine)
    sampling = Sampling(max_new_tokens=limit - len(have))
    with contextlib.suppress(EngineFailedError):
        async for batch in client.generate(name, prompt + have, sampling, resumes=old):
            have += batch.token_ids
    await client.close()


async def run(options: argparse.Namespace, folder: Path) -> bool:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    prompt = tokenizer.encode(_PROMPT.format(options.question)).ids
    path = os.pathsep.join([str(write_plugins(folder / "plugins")), str(ROOT)])
    host = SglangHost(
        None,
        arguments(options.model, tokens=8192, requests=4),
        folder / "logs",
        owner_pid=os.getpid(),
        environment=ENVIRONMENT | {"PYTHONPATH": path},
        memory=MemoryProcess("cpu", folder / "memory.sock", os.getpid()),
    )
    main = await host.start("main", "main")
    shadow = await host.start("shadow", "shadow")
    undisturbed: list[int] = []
    await generate(host, main, "undisturbed", prompt, undisturbed, options.tokens)
    tokens: list[int] = []
    stream = asyncio.create_task(generate(host, main, "first", prompt, tokens, options.tokens))
    while len(tokens) < len(undisturbed) // 2:
        await asyncio.wait((stream,), timeout=0.005)
    status = await host.status()
    os.kill(next(engine.pid for engine in status.engines if engine.holds_arena), signal.SIGKILL)
    await host.promote(shadow)
    await stream
    had = len(tokens)
    await generate(host, shadow, "second", prompt, tokens, options.tokens, old="first")
    await host.kill(shadow)
    before, after = tokenizer.decode(tokens[:had]), tokenizer.decode(tokens[had:])
    print(f"{options.question}\n\n{before} [the engine is killed] {after}")
    equal = tokens == undisturbed
    print(f"\n{len(tokens)} tokens, {had} before the kill; {'the same' if equal else 'NOT the same'} as undisturbed")
    return equal


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.readable")
    parser.add_argument("model", type=Path)
    parser.add_argument("--question", default="Tell me about lighthouses in two sentences.")
    parser.add_argument("--tokens", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="belayer-readable-") as folder:
        sys.exit(0 if asyncio.run(run(options, Path(folder))) else 1)


if __name__ == "__main__":
    main()
