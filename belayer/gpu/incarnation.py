"""Engines are known by incarnation, never by address: an engine answers no request that is meant for another one.

A port comes again: what listens where an engine was may be another engine. So whoever means one names it in a header,
and an engine of another name answers 409, whatever the path. A request that names none is answered.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

INCARNATION_HEADER = "X-Belayer-Incarnation"
WRONG_INCARNATION = 409

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[Any]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def meant(incarnation: str) -> dict[str, str]:
    """The headers of a request that is meant for that engine alone."""
    return {INCARNATION_HEADER: incarnation}


def wrong(incarnation: str, wanted: str) -> dict[str, Any]:
    """The body of the refusal, in OpenAI's form for errors."""
    message = f"this is {incarnation}, not {wanted}"
    return {"error": {"message": message, "type": "wrong_incarnation", "code": WRONG_INCARNATION}}


class OnlyForThis:
    """ASGI middleware (ASGI specification 3.0) around an engine's HTTP server."""

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]], incarnation: str) -> None:
        self._app = app
        self._incarnation = incarnation

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        name = INCARNATION_HEADER.lower().encode()
        wanted = dict(scope.get("headers", ())).get(name) if scope["type"] == "http" else None
        if wanted is None or wanted.decode("latin-1") == self._incarnation:
            return await self._app(scope, receive, send)
        body = json.dumps(wrong(self._incarnation, wanted.decode("latin-1"))).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": WRONG_INCARNATION, "headers": headers})
        await send({"type": "http.response.body", "body": body})
