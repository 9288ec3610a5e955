"""The Engine Protocol over SGLang's HTTP `/generate`: one client for SGLang and for the recorded engine.

Every token is given once and in order, whether the server streams increments or, as SGLang does by default,
everything so far each time. When it fails: a refused connection, a broken stream, an end without a finish reason, an
abort or silence beyond the deadline is EngineFailedError; a prefix that the recorded engine refuses is
PrefixRefusedError; another request that the server calls wrong is InputError, since a retry elsewhere would be wrong
too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any

import aiohttp
import msgspec

from belayer.errors import EngineFailedError, InputError, PrefixRefusedError
from belayer.gpu.incarnation import meant
from belayer.gpu.protocol import EngineProcess, Sampling, TokenBatch

RESUME_KEY = "belayer_resume"
"""In a request's `custom_params`: [its id on the dead engine, number of tokens that the caller has]."""
RESUME_UNKNOWN = "does not know the request that is resumed"
"""In the message of the abort with which the plugin answers a resumption that it cannot complete."""
WEIGHT_VERSIONS_KEY = "belayer_weight_versions"
"""In a response's `meta_info`: the version of the weights that each token came from, from Belayer's plugin."""
_RESUME_TAIL_TOKENS = 32
_TOGETHER_S = 0.001


class HttpEngine:
    """A connection to one engine incarnation. `silence_s` bounds the wait for any token, the first one included."""

    def __init__(self, engine: EngineProcess, *, silence_s: float = 120.0) -> None:
        self._engine = engine
        self._silence_s = silence_s
        self._session: aiohttp.ClientSession | None = None
        self._gathered: list[_Resuming] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(
        self, request: str, prefix: Sequence[int], sampling: Sampling, *, resumes: str = ""
    ) -> AsyncGenerator[TokenBatch]:
        """Stream what follows the prefix, of n token ids. Close the iterator (`contextlib.aclosing`) to abort.

        `resumes` is the id that this request had on the engine whose KV cache this one took over: then most of the
        prefix need not be sent. When the engine does not know it, all of it is, in the same call. Those that resume in
        the same moment share one HTTP request: 64 of their own take SGLang's server longer than a handover.
        """
        if resumes and len(prefix) > _RESUME_TAIL_TOKENS:
            received = 0
            try:
                async for batch in self._tokens(self._together(_resuming_body(request, prefix, sampling, resumes))):
                    received += len(batch.token_ids)
                    yield batch
                return
            except EngineFailedError as error:
                if received or RESUME_UNKNOWN not in error.evidence:
                    raise
            request += "~"  # SGLang aborts an id again 2 s after its response has ended
        async for batch in self._tokens(self._alone(_body(request, prefix, sampling))):
            yield batch

    async def _tokens(self, events: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[TokenBatch]:
        received = 0
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    for batch in self._batches(event, received):
                        received += len(batch.token_ids)
                        if batch.token_ids or batch.finish_reason is not None:
                            yield batch
                        if batch.finish_reason is not None:
                            return
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            what = str(error) or type(error).__name__
            raise self._failed(f"the stream broke after {received} tokens ({what})") from None
        raise self._failed(f"the stream ended after {received} tokens without a finish reason")

    async def _alone(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The events of one HTTP request."""
        async with self._post("generate", body) as response:
            if response.status != 200:
                raise self._refusal(response.status, await response.read())
            async for event in self._events(response):
                yield event

    async def _together(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The same, of a request that shares its HTTP request with all that come within a moment."""
        mine = _Resuming(body)
        if not self._gathered:
            self._beside(self._send_gathered())
        self._gathered.append(mine)
        finished = False
        try:
            while not finished:
                event = await asyncio.wait_for(mine.events.get(), self._silence_s)
                if isinstance(event, Exception):
                    raise event
                finished = event.get("meta_info", {}).get("finish_reason") is not None
                yield event
        finally:
            if not finished:
                self._beside(self._abort(body["rid"]))

    async def _send_gathered(self) -> None:
        await asyncio.sleep(_TOGETHER_S)
        group, self._gathered = self._gathered, []
        by_id = {one.body["rid"]: one for one in group}
        error: Exception = self._failed("the stream ended without a finish reason")
        try:
            async with contextlib.aclosing(self._alone(_joined([one.body for one in group]))) as events:
                async for event in events:
                    for one in [by_id[event["meta_info"]["id"]]] if "meta_info" in event else group:
                        one.events.put_nowait(event)
        except (EngineFailedError, InputError, PrefixRefusedError, TimeoutError, aiohttp.ClientError, OSError) as cause:
            error = cause
        for one in group:
            one.events.put_nowait(error)

    async def _abort(self, request: str) -> None:
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with self._post("abort_request", {"rid": request}):
                pass

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        if self._session is None:
            # One connection a stream, however many: how many run at once is the engine's to decide.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session.post(
            f"{self._engine.address}/{path}",
            data=msgspec.json.encode(body),
            headers={**meant(self._engine.incarnation), "Content-Type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._silence_s, sock_read=self._silence_s),
        )

    async def close(self) -> None:
        """Close the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
        """The `data:` lines of a stream of server-sent events (WHATWG HTML, 9.2.6), as far as SGLang uses them."""
        pending = b""
        async for piece in response.content.iter_any():
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if not line.startswith(b"data:"):
                    continue
                try:
                    yield msgspec.json.decode(data, type=dict[str, Any])
                except msgspec.DecodeError as error:
                    raise self._failed(f"sent what is no event: {error}") from None

    def _batches(self, event: dict[str, Any], received: int) -> list[TokenBatch]:
        """The tokens that are new in this event: the last `completion_tokens - received` of those that it carries.

        One batch for each version of the weights; mostly that is one.
        """
        if "error" in event:
            raise self._refusal(int(event["error"].get("code", 500)), msgspec.json.encode(event))
        try:
            info = event["meta_info"]
            fresh = int(info["completion_tokens"]) - received
            token_ids = event["output_ids"][len(event["output_ids"]) - fresh :] if fresh > 0 else []
            entries = info["output_token_logprobs"]
            logprobs = [float(entry[0]) for entry in entries[len(entries) - fresh :]] if fresh > 0 else []
            finish = info["finish_reason"]
            version = str(info.get("weight_version", "0"))
            versions = [int(one) for one in info.get(WEIGHT_VERSIONS_KEY, ())]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self._failed(f"sent an event without what Belayer needs ({error!r})") from None
        if fresh < 0 or not len(token_ids) == len(logprobs) == fresh:
            raise self._failed(f"sent {len(token_ids)} token ids and {len(logprobs)} logprobs where {fresh} were new")
        kind = None
        if finish is not None:
            kind = str(finish["type"])
            if kind == "abort":
                raise self._failed(f"aborted the request: {finish.get('message', 'no reason given')}")
        versions = versions[len(versions) - fresh :] or [int(version) if version.isdecimal() else 0] * fresh
        if len(versions) != fresh:
            raise self._failed(f"sent {len(versions)} weight versions where {fresh} tokens were new")
        starts = [0, *(n for n in range(1, fresh) if versions[n] != versions[n - 1])]
        batches: list[TokenBatch] = []
        for start, end in zip(starts, [*starts[1:], fresh], strict=True):
            finish_reason = kind if end == fresh else None
            weight_version = versions[start] if fresh else 0
            batches.append(TokenBatch(token_ids[start:end], logprobs[start:end], weight_version, finish_reason))
        return batches

    def _refusal(self, status: int, body: bytes) -> Exception:
        try:
            error = msgspec.json.decode(body, type=dict[str, Any])["error"]
            kind, message, offset = error.get("type"), str(error["message"]), int(error.get("offset", 0))
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError):
            kind, message, offset = None, body[:200].decode(errors="replace"), 0
        if kind == "prefix_refused":
            return PrefixRefusedError(offset, message)
        if 400 <= status < 500 and status not in (408, 409, 429):
            return InputError(f"engine {self._engine.incarnation} refused the request: {message}")
        return self._failed(f"answered {status}: {message}")

    def _failed(self, evidence: str) -> EngineFailedError:
        return EngineFailedError(self._engine.incarnation, evidence)


class _Resuming:
    """A request in a group, and what has come for it: events, and last an error."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.events: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue()


def _joined(bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """One GenerateReqInput for all of them."""
    if len(bodies) == 1:
        return bodies[0]
    each = {name: [body[name] for body in bodies] for name in ("rid", "input_ids", "sampling_params")}
    return bodies[0] | each


def _resuming_body(request: str, prefix: Sequence[int], sampling: Sampling, resumes: str) -> dict[str, Any]:
    """The same with the prefix's end alone: Belayer's plugin knows the rest (belayer/gpu/plugin/resume.py)."""
    body = _body(request, prefix[-_RESUME_TAIL_TOKENS:], sampling)
    body["sampling_params"]["custom_params"] = {RESUME_KEY: [resumes, len(prefix)]}
    return body


def _body(request: str, prefix: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    """SGLang's GenerateReqInput."""
    return {
        "rid": request,
        "input_ids": list(prefix),
        "sampling_params": {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": list(sampling.stop_token_ids),
            **sampling.others,
        },
        "return_logprob": True,
        "stream": True,
    }
