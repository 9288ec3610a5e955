"""Where a token chunk's time goes on the client: each step of an append by itself, in microseconds, quickest of many.

The steps are what an append cannot do without. What the whole costs above their sum is Python between them.
`python -m benchmarks.journal_parts` prints them, and what each form of token columns takes.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
import timeit
from collections.abc import Callable
from functools import partial

import msgspec

from belayer.blocking import new_event_loop
from belayer.ids import new_event_id
from belayer.journal.codec import Envelope, digest_of, encode_event
from belayer.journal.columns import pack_logprobs, pack_token_ids
from belayer.journal.events import TokensAppended, TokensPacked
from belayer.journal.link import pack
from belayer.journal.packing import FORMS, checked_form, packed, unpacked
from benchmarks.journal_loads import Chunks

_GROUP = 48
"""Chunks that travel together when many trajectories append."""


_encode = msgspec.msgpack.Encoder().encode


def parts(tokens: int, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> dict[str, float]:
    """Microseconds for each step of appending one chunk of `tokens`. Not to be called in an event loop."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        woken = runner.run(wakeup())
    event = Chunks(tokens).event(1)
    entry = encode_event(1, 7, bytes(16), event, bytes(16), 1 << 60)
    body = entry.body
    command = pack((b"XADD", b"{belayer:default:0}:s:trajectory/t-1234", b"NOMKSTREAM", b"1-8", b"e", body))
    return {
        "event_id": quickest(new_event_id),
        "msgpack": quickest(lambda: encoded(event)),
        "digest": quickest(lambda: digest_of(body)),
        "command": quickest(lambda: pack((b"XADD", b"key", b"NOMKSTREAM", b"1-8", b"e", body))),
        "socket": round(through_a_socket(command * _GROUP) / _GROUP, 2),
        "future_and_wakeup": woken,
    }


def quickest(step: Callable[[], object], times: int = 5_000) -> float:
    return round(min(timeit.repeat(step, number=times, repeat=7)) / times * 1e6, 2)


def encoded(event: TokensAppended) -> bytes:
    return _encode(Envelope(bytes(16), bytes(16), 1 << 60, event))


def through_a_socket(data: bytes) -> float:
    """Microseconds of this process for handing `data` to the kernel; reading it on the other side is not counted."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    took: list[float] = []
    with ours, theirs:
        ours.setblocking(False)
        for _ in range(300):
            begun, sent = time.process_time(), ours.send(data)
            took.append((time.process_time() - begun) * len(data) / sent)
            while sent:
                sent -= len(theirs.recv(1 << 20))
    return min(took) * 1e6


async def wakeup() -> float:
    """A future made, awaited by a task, and set by another."""
    loop = asyncio.get_running_loop()
    many = 500

    async def wait(done: asyncio.Future[None]) -> None:
        await done

    took: list[float] = []
    for _ in range(30):
        begun = time.process_time()
        futures = [loop.create_future() for _ in range(many)]
        made = time.process_time() - begun
        tasks = [loop.create_task(wait(done)) for done in futures]
        await asyncio.sleep(0)
        begun = time.process_time()
        for done in futures:
            done.set_result(None)
        await asyncio.gather(*tasks)
        took.append(made + time.process_time() - begun)
    return round(min(took) / many * 1e6, 2)


def incompressible(tokens: int) -> TokensAppended:
    """Any ids, any logprobs that are numbers."""
    rng = random.Random(1)
    token_ids = [rng.getrandbits(32) for _ in range(tokens)]
    logprobs = pack_logprobs([-rng.expovariate(1.0) for _ in range(tokens)])
    return TokensAppended(1, 0, tokens, pack_token_ids(token_ids), logprobs, b"\x01" * tokens, 0)


def like_text(tokens: int) -> TokensAppended:
    """A chunk as a model might write it: few ids often, most rarely; a third of the tokens certain."""
    rng = random.Random(1)
    token_ids = [min(151_935, int(7 * rng.paretovariate(0.4))) for _ in range(tokens)]
    logprobs = [0.0 if rng.random() < 1 / 3 else -(rng.expovariate(3.0) ** 3) for _ in range(tokens)]
    return TokensAppended(1, 0, tokens, pack_token_ids(token_ids), pack_logprobs(logprobs), b"\x01" * tokens, 0)


def forms(tokens: int) -> dict[str, dict[str, float]]:
    """For each form: bytes a token of the whole entry, of random columns and of some like text; us to pack, unpack."""
    found: dict[str, dict[str, float]] = {}
    for name in FORMS:
        form = checked_form(name)
        figures: dict[str, float] = {}
        for what, one in (("any", incompressible(tokens)), ("like_text", like_text(tokens))):
            entry = encode_event(1, 7, bytes(16), packed(one, form), bytes(16), 1 << 60)
            figures[f"bytes_per_token_{what}"] = round(len(entry.body) / tokens, 2)
        stored = packed(chunk := like_text(tokens), form)
        if isinstance(stored, TokensPacked):
            figures["pack_us"] = quickest(partial(packed, chunk, form), 500)
            figures["unpack_us"] = quickest(partial(unpacked, "", stored), 500)
        found[name] = figures
    return found


def main() -> None:
    for tokens in (32, 256):
        print(json.dumps({"chunk_tokens": tokens, "parts_us": parts(tokens, new_event_loop), "forms": forms(tokens)}))


if __name__ == "__main__":
    main()
