"""The gateway's HTTP.

A stream's headers go out once the request is in the journal; each of its events has the number of tokens that the
caller then has as its id, which is what X-Belayer-Offset or Last-Event-ID say when the caller comes back. An error
before that is a status with a JSON body, after it an event with the same body and the end of the stream.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from belayer.errors import InputError
from belayer.gpu.gateway import native, openai
from belayer.gpu.gateway.answer import Answer, Part
from belayer.gpu.gateway.desk import Desk
from belayer.gpu.gateway.engines import Engines, Report
from belayer.gpu.gateway.errors import RefusedError, wrong
from belayer.gpu.gateway.request import Asked, Form
from belayer.gpu.gateway.settings import Settings
from belayer.gpu.gateway.text import Tokenizer
from belayer.gpu.gateway.workers import Workers
from belayer.journal.store import JournalStore

OFFSET_HEADER = "X-Belayer-Offset"
_BODY_BYTES = 1 << 26
_BACKLOG = 4096
_SEND_BYTES = 1 << 17
_EVENT_STREAM: Mapping[str, str] = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Handlers:
    """The HTTP handlers of one gateway."""

    desk: Desk
    workers: Workers
    settings: Settings
    tokenizer: Tokenizer | None

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_BODY_BYTES, middlewares=[_refusals])
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        return app

    async def generate(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, *native.asked(await request.read(), request.headers, _offset(request)))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        openai.need(self.tokenizer)
        asked, form = openai.asked_completion(await request.read(), request.headers, _offset(request))
        return await self._answer(request, asked, form)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        return await self._answer(request, *openai.asked_chat(body, request.headers, _offset(request), self.tokenizer))

    async def health(self, request: web.Request) -> web.Response:
        routes = {name: self.workers.route(name) for name in self.workers.states}
        engines = {name: None if route is None else route.incarnation for name, route in routes.items()}
        able = any(engines.values()) and not self.desk.draining
        said = {
            "status": "draining" if self.desk.draining else "ok" if able else "no engine",
            "engines": engines,
            "weight_version": self.workers.weight_version,
            "open_requests": self.desk.callers,
        }
        return web.json_response(said, status=200 if able else 503)

    async def models(self, request: web.Request) -> web.Response:
        model = {"id": self.settings.model, "object": "model", "created": 0, "owned_by": "belayer"}
        return web.json_response({"object": "list", "data": [model]})

    async def _answer(self, request: web.Request, asked: Asked, form: Form) -> web.StreamResponse:
        with self.desk.attached(asked, form) as (answer, caller):
            await answer.opened()
            if caller.offset > len(answer.token_ids):
                raise wrong(
                    f"offset {caller.offset} is beyond the {len(answer.token_ids)} tokens that the journal has of "
                    f"{asked.rid}; a stream's event id is the offset after it"
                )
            head = {"id": asked.rid, "created": int(time.time()), "model": self.settings.model}
            if not form.stream:
                finish = await answer.ended()
                part = Part(0, len(answer.token_ids), finish)
                return web.Response(
                    body=_encode(self._whole(answer, form, part, head)), content_type="application/json"
                )
            response = web.StreamResponse(headers={**_EVENT_STREAM, "X-Request-Id": asked.rid})
            try:
                await response.prepare(request)
                async for part in answer.parts(caller):
                    await response.write(b"".join(self._events(answer, form, part, head)))
                await response.write(b"data: [DONE]\n\n")
            except RefusedError as error:
                with suppress(ConnectionError):
                    await response.write(b"data: " + _encode(error.body()) + b"\n\n")
            except ConnectionError:
                return response  # the caller is gone; nobody is left to tell
            with suppress(ConnectionError):
                await response.write_eof()
            return response

    def _whole(self, answer: Answer, form: Form, part: Part, head: Mapping[str, Any]) -> dict[str, Any]:
        if form.kind == "generate":
            return native.event(answer, form, part)
        return openai.whole(answer, form, part, head, openai.need(self.tokenizer))

    def _events(self, answer: Answer, form: Form, part: Part, head: Mapping[str, Any]) -> Iterator[bytes]:
        yield b"id: %d\n" % part.stop
        if form.kind == "generate":
            yield b"data: " + _encode(native.event(answer, form, part)) + b"\n\n"
            return
        for piece in openai.pieces(answer, form, part, head, openai.need(self.tokenizer)):
            yield b"data: " + _encode(piece) + b"\n\n"


def _offset(request: web.Request) -> int:
    """How many tokens the caller has."""
    given = request.headers.get(OFFSET_HEADER) or request.headers.get("Last-Event-ID") or "0"
    if not (given.isascii() and given.isdigit()):
        raise wrong(f"{OFFSET_HEADER}: {given!r} is not a number of tokens")
    return int(given)


@web.middleware
async def _refusals(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        return await handler(request)
    except RefusedError as error:
        headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
        return web.json_response(error.body(), status=error.status, headers=headers)
    except web.HTTPException as error:
        refused = RefusedError(
            error.status, "invalid_request_error", f"{request.method} {request.path}: {error.reason}"
        )
        return web.json_response(refused.body(), status=error.status)


def _listening(host: str, port: int) -> socket.socket:
    """The socket, with a bound on what the kernel holds for one slow caller (it would go up to several MB)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise InputError(f"port {port} of {host} cannot be used ({error.strerror}); give another, or 0") from None
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
    return listening


@asynccontextmanager
async def serving(
    store: JournalStore,
    workers: list[str],
    report: Report,
    settings: Settings,
    tokenizer: Tokenizer | None,
    host: str,
    port: int,
) -> AsyncIterator[Serving]:
    """A gateway that answers at `address` until the block is left; then it drains. InputError: the port is taken."""
    async with AsyncExitStack() as stack:
        engines = Engines(report, settings.silence_s)
        stack.push_async_callback(engines.close)
        following = await stack.enter_async_context(Workers(store, workers, engines.ended))
        desk = Desk(store, following, engines, settings, tokenizer)
        app = Handlers(desk, following, settings, tokenizer).application()
        runner = web.AppRunner(app, handle_signals=False, handler_cancellation=True, access_log=None)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, _listening(host, port), backlog=_BACKLOG).start()
        try:
            yield Serving(f"http://{host}:{runner.addresses[0][1]}", desk, following)
        finally:
            await desk.drain(settings.drain_s)


@dataclass(frozen=True, slots=True)
class Serving:
    """A gateway that answers."""

    address: str
    desk: Desk
    workers: Workers

    async def until_stopped(self) -> None:
        """Return at SIGTERM or SIGINT; raises when the workers' streams cannot be followed any more."""
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        stopping = asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait([stopping, self.workers.broken], return_when=asyncio.FIRST_COMPLETED)
            if self.workers.broken.done():
                self.workers.broken.result()
        finally:
            stopping.cancel()
