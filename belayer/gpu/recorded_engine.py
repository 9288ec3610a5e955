"""The recorded engine: a process that speaks SGLang's HTTP and says, token by token, what a recorded model said.

    python -m belayer.gpu.recorded_engine --recordings DIR --owner-pid PID [--port 0] [--tokens-per-s N] [--standby]
        [--hold FILE]

It is given only the prefix (`belayer.gpu.recorded_prefix` finds the place), keeps no state between requests, and
prints one JSON line, `{"address": "http://127.0.0.1:PORT"}`, once it answers. A standby answers /health but refuses
to generate until /promote. It ends when its owner has ended. A prefix that is not the recording's gets HTTP 400 with
the offset. While FILE exists, it says no more of a turn than the first so many tokens as it names: so whoever wants a
stream to be in its middle need not be quick.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from belayer.errors import InputError, PrefixRefusedError
from belayer.gpu.incarnation import INCARNATION_HEADER, WRONG_INCARNATION, wrong
from belayer.gpu.recorded_prefix import END, Position, TokenRecording, load, locate, logprob
from belayer.processes import exit_with_owner

_SHORTEST_PAUSE_S = 0.005


@dataclass(slots=True)
class RecordedEngine:
    """The HTTP handlers. `standby` is the only thing that changes."""

    recordings: Sequence[TokenRecording]
    tokens_per_s: float
    incarnation: str
    standby: bool
    weight_version: int = 0
    hold: Path | None = None
    clock: Callable[[], float] = time.monotonic

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28, middlewares=[self.only_for_this])
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/health", self.health)
        app.router.add_post("/promote", self.promote)
        return app

    @web.middleware
    async def only_for_this(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        wanted = request.headers.get(INCARNATION_HEADER, self.incarnation)
        if wanted != self.incarnation:
            return web.json_response(wrong(self.incarnation, wanted), status=WRONG_INCARNATION)
        return await handler(request)

    async def health(self, request: web.Request) -> web.Response:
        role = "standby" if self.standby else "main"
        return web.json_response({"incarnation": self.incarnation, "role": role})

    async def promote(self, request: web.Request) -> web.Response:
        self.standby = False
        return await self.health(request)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if self.standby:
            return _error(503, "standby", f"{self.incarnation} is a standby; promote it first")
        try:
            body = await request.json()
            prefix = [int(token) for token in body["input_ids"]]
            sampling = body.get("sampling_params") or {}
            limit = sampling.get("max_new_tokens", 4096)
            max_new_tokens = sys.maxsize if limit is None else int(limit)
            request_id = str(body.get("rid", ""))
            if not body.get("stream"):
                raise ValueError("only stream=true is offered")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return _error(400, "invalid_request_error", f"not a request that this engine understands: {error!r}")
        try:
            position = locate(self.recordings, prefix)
        except PrefixRefusedError as error:
            return _error(400, "prefix_refused", error.problem, offset=error.offset)
        return await self._stream(request, position, request_id, len(prefix), max_new_tokens)

    async def _stream(
        self, request: web.Request, position: Position, request_id: str, prompt_tokens: int, max_new_tokens: int
    ) -> web.StreamResponse:
        turn = position.recording.turn(position.turn)
        rest = turn[position.offset : position.offset + max_new_tokens]
        whole = position.offset + len(rest) == len(turn)
        finish: dict[str, Any] = {"type": "stop", "matched": END} if whole else {"type": "length", "length": len(rest)}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        started = self.clock()
        sent = 0
        try:
            while True:
                allowed = max(sent, self._most() - position.offset)
                due = min(len(rest), int((self.clock() - started) * self.tokens_per_s), allowed)
                if due > sent or sent == len(rest):
                    event = self._event(position, rest, sent, due, request_id, prompt_tokens)
                    event["meta_info"]["finish_reason"] = finish if due == len(rest) else None
                    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                    sent = due
                if sent == len(rest):
                    break
                pause_s = started + (sent + 1) / self.tokens_per_s - self.clock()
                await asyncio.sleep(max(pause_s, _SHORTEST_PAUSE_S))
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        except ConnectionError:
            pass  # the caller is gone; nobody is left to tell
        return response

    def _most(self) -> int:
        """How many tokens of a turn may be said now."""
        if self.hold is not None:
            with contextlib.suppress(FileNotFoundError):
                return int(self.hold.read_text())
        return sys.maxsize

    def _event(
        self, position: Position, rest: Sequence[int], start: int, stop: int, request_id: str, prompt_tokens: int
    ) -> dict[str, Any]:
        """One event as SGLang sends it with --incremental-streaming-output."""
        name, first = position.recording.name, position.offset
        logprobs = [[logprob(name, position.turn, first + at, rest[at]), rest[at], None] for at in range(start, stop)]
        return {
            "output_ids": list(itertools.islice(rest, start, stop)),
            "meta_info": {
                "id": request_id,
                "prompt_tokens": prompt_tokens,
                "completion_tokens": stop,
                "cached_tokens": 0,
                "weight_version": str(self.weight_version),
                "output_token_logprobs": logprobs,
            },
        }


def _error(status: int, kind: str, message: str, **fields: int) -> web.Response:
    return web.json_response({"error": {"message": message, "type": kind, "code": status, **fields}}, status=status)


async def _serve(engine: RecordedEngine, host: str, port: int) -> None:
    runner = web.AppRunner(engine.application(), handle_signals=False, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        raise InputError(f"port {port} of {host} cannot be used ({error.strerror}); give another one, or 0") from None
    bound_port = runner.addresses[0][1]
    sys.stdout.write(json.dumps({"address": f"http://{host}:{bound_port}"}) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m belayer.gpu.recorded_engine", description=__doc__)
    parser.add_argument("--recordings", type=Path, required=True)
    parser.add_argument("--owner-pid", type=int, required=True)
    parser.add_argument("--incarnation", default="recorded")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokens-per-s", type=float, default=400.0)
    parser.add_argument("--standby", action="store_true")
    parser.add_argument("--hold", type=Path)
    options = parser.parse_args(arguments)
    exit_with_owner(options.owner_pid)
    try:
        if options.tokens_per_s <= 0:
            raise InputError(f"--tokens-per-s must be above 0; got {options.tokens_per_s:g}")
        engine = RecordedEngine(
            load(options.recordings), options.tokens_per_s, options.incarnation, options.standby, hold=options.hold
        )
        asyncio.run(_serve(engine, options.host, options.port))
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
