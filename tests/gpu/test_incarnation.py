"""An engine answers what is meant for it or for nobody by name; test_sglang_incarnation.py has a real engine."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from belayer.gpu.incarnation import OnlyForThis

Message = MutableMapping[str, Any]


async def said(scope: Message) -> list[Message]:
    """What comes out of the middleware around an application that says nothing but its own name."""
    sent: list[Message] = []

    async def application(*_: object) -> None:
        sent.append({"type": "application"})

    async def receive() -> Message:
        raise AssertionError("nobody asked for the body")

    async def send(message: Message) -> None:
        sent.append(message)

    await OnlyForThis(application, "a")(scope, receive, send)
    return sent


@pytest.mark.parametrize(
    "scope",
    [
        {"type": "http", "path": "/generate", "headers": [(b"accept", b"*/*")]},
        {"type": "http", "path": "/generate", "headers": [(b"x-belayer-incarnation", b"a")]},
        {"type": "lifespan"},
    ],
)
async def test_what_is_meant_for_it_or_for_nobody_by_name_is_passed_on(scope: Message) -> None:
    assert await said(scope) == [{"type": "application"}]


async def test_what_is_meant_for_another_is_refused_whatever_the_path() -> None:
    start, body = await said({"type": "http", "path": "/any", "headers": [(b"x-belayer-incarnation", b"b")]})
    assert start["status"] == 409
    error = json.loads(body["body"])["error"]
    assert (error["type"], error["message"]) == ("wrong_incarnation", "this is a, not b")
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
