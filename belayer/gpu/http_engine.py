"""The Engine Protocol over SGLang's HTTP `/generate`: one client for SGLang and for the recorded engine.

Every token is given once and in order, whether the server streams increments or, as SGLang does by default,
everything so far each time. When it fails: a refused connection, a broken stream, an end without a finish reason, an
abort or silence beyond the deadline is EngineFailedError; a prefix that the recorded engine refuses is
PrefixRefusedError; another request that the server calls wrong is InputError, since a retry elsewhere would be wrong
too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import aiohttp
import msgspec

from belayer.errors import EngineFailedError, InputError, PrefixRefusedError
from belayer.gpu.incarnation import meant
from belayer.gpu.progress import HangRule
from belayer.gpu.protocol import EngineProcess, Sampling, TokenBatch
from belayer.gpu.resume_group import UNREAD_TOKENS, FellBehindError, Member, joined

T = TypeVar("T")

RESUME_KEY = "belayer_resume"
"""In a request's `custom_params`: [its id on the dead engine, number of tokens that the caller has]."""
RESUME_UNKNOWN = "does not know the request that is resumed"
"""In the message of the abort with which the plugin answers a resumption that it cannot complete."""
WEIGHT_VERSIONS_KEY = "belayer_weight_versions"
"""In a response's `meta_info`: the version of the weights that each token came from, from Belayer's plugin."""
_RESUME_TAIL_TOKENS = 32
_TOGETHER_S = 0.001
_BREAKS = (TimeoutError, aiohttp.ClientError, OSError)


class HttpEngine:
    """A connection to one engine incarnation. `silence_s` bounds the wait for any token, the first one included; a
    weight update holds all of an engine's streams, so it is longer than one may take.

    Every wait for the engine ends at that bound, and at once when the client is ended or closed.
    """

    def __init__(self, engine: EngineProcess, *, silence_s: float = HangRule().callers_s) -> None:
        self._engine = engine
        self._silence_s = silence_s
        self._session: aiohttp.ClientSession | None = None
        self._group: list[Member] = []
        """Those that wait for company."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._waits: set[asyncio.Timeout] = set()
        self._ended = ""
        """Why nothing comes any more."""

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
                async with aclosing(self._together(_resuming_body(request, prefix, sampling, resumes))) as batches:
                    async for batch in batches:
                        received += len(batch.token_ids)
                        yield batch
                return
            except EngineFailedError as error:
                if received or RESUME_UNKNOWN not in error.evidence:
                    raise
            except (InputError, PrefixRefusedError):
                if received:
                    raise
                # It may be another of the group that was refused.
            request += "~"  # SGLang aborts an id again 2 s after its response has ended
        async with aclosing(self._alone(_body(request, prefix, sampling))) as batches:
            async for batch in batches:
                yield batch

    async def _alone(self, body: dict[str, Any]) -> AsyncGenerator[TokenBatch]:
        """The tokens of a request that has an HTTP request to itself."""
        received = 0
        deadline = self._deadline()
        try:
            async with aclosing(self._answer(body)) as events:
                while (event := await self._by(deadline, lambda: anext(events, None))) is not None:
                    for batch in self._batches(event, received):
                        received += len(batch.token_ids)
                        if batch.token_ids or batch.finish_reason is not None:
                            yield batch
                            deadline = self._deadline()
                        if batch.finish_reason is not None:
                            return
        except _BREAKS as error:
            raise self._broken(received, error) from None
        raise self._failed(f"the stream ended after {received} tokens without a finish reason")

    async def _together(self, body: dict[str, Any]) -> AsyncGenerator[TokenBatch]:
        """The same, of a request that shares its HTTP request with all that come within a moment."""
        mine = Member(body)
        if not self._group:
            self._beside(self._send_group())
        self._group.append(mine)
        finish_reason = None
        try:
            while finish_reason is None:
                deadline = self._deadline()
                while (batch := mine.take()) is None:
                    await self._by(deadline, mine.arrived.wait)
                finish_reason = batch.finish_reason
                yield batch
        except _BREAKS as error:
            raise self._broken(mine.received, error) from None
        finally:
            self._drop(mine, self._failed("nobody reads it"))

    async def _send_group(self) -> None:
        """Give each its tokens, until all have ended; whatever ends this ends them."""
        await asyncio.sleep(_TOGETHER_S)
        group, self._group = [one for one in self._group if one.runs], []
        by_id = {one.body["rid"]: one for one in group}
        cause: Exception = self._failed("the stream ended without a finish reason")
        try:
            if not group:
                return
            async with aclosing(self._answer(joined(group))) as events:
                async for event in events:
                    for one in [by_id[event["meta_info"]["id"]]] if "meta_info" in event else group:
                        self._pass_on(event, one)
                        if not one.runs and not any(other.runs for other in group):
                            return
        except (KeyError, TypeError) as error:
            cause = self._failed(f"sent an event of no request that it was given ({error!r})")
        except (*_BREAKS, EngineFailedError, InputError, PrefixRefusedError) as error:
            cause = error
        finally:
            for one in group:
                one.end(self._broken(one.received, cause) if isinstance(cause, _BREAKS) else cause)

    def _pass_on(self, event: dict[str, Any], one: Member) -> None:
        if not one.runs:
            return
        if one.is_full:
            behind = f"{UNREAD_TOKENS} tokens wait for their reader, who would hold up those that share his stream"
            self._drop(one, FellBehindError(self._engine.incarnation, behind))
            return
        try:
            one.give(self._batches(event, one.received))
        except (EngineFailedError, InputError, PrefixRefusedError) as error:
            if "error" in event or event["meta_info"].get("finish_reason") is not None:
                one.end(error)  # the engine has ended it itself
            else:
                self._drop(one, error)

    def _drop(self, one: Member, why: Exception) -> None:
        """It takes no more: the engine need not go on with it."""
        if one.runs:
            one.end(why)
            if not self._ended:
                self._beside(self._abort(one.body["rid"]))

    async def _abort(self, request: str) -> None:
        with suppress(*_BREAKS):
            async with self._post("abort_request", {"rid": request}):
                pass

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._silence_s

    async def _by(self, deadline: float, step: Callable[[], Awaitable[T]]) -> T:
        """The step's result; TimeoutError at the deadline, and at once when the client is ended.

        aiohttp's own timeout is not enough: it is dropped, and nobody woken, when a session closes.
        """
        if self._ended:
            raise TimeoutError
        async with asyncio.timeout_at(deadline) as wait:
            self._waits.add(wait)
            try:
                return await step()
            finally:
                self._waits.discard(wait)

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

    def end(self, why: str) -> None:
        """End every stream now, and every later one at its first step, with EngineFailedError."""
        self._ended = self._ended or why
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0)
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """End every stream, then close the connections."""
        self.end("its client was closed")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _answer(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The events of one HTTP request."""
        async with self._post("generate", body) as response:
            if response.status != 200:
                raise self._refusal(response.status, await response.read())
            async for event in self._events(response):
                yield event

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

    def _broken(self, received: int, error: Exception) -> EngineFailedError:
        silence = f"nothing came for {self._silence_s:g} s" if isinstance(error, TimeoutError) else ""
        what = self._ended or str(error) or silence or type(error).__name__
        return self._failed(f"the stream broke after {received} tokens ({what})")

    def _failed(self, evidence: str) -> EngineFailedError:
        return EngineFailedError(self._engine.incarnation, evidence)


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
