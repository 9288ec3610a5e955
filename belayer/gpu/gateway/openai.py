"""OpenAI's `/v1/completions` and `/v1/chat/completions`: requests, and answers whole or as a stream.

Both need the gateway's tokenizer: engines are given token ids and give token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from belayer.gpu.gateway import request
from belayer.gpu.gateway.answer import Answer, Part
from belayer.gpu.gateway.errors import wrong
from belayer.gpu.gateway.request import Asked, Count, Form, Positive, Texts, TokenId, only_neutral
from belayer.gpu.gateway.text import Tokenizer


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both requests share: OpenAI's parameters and SGLang's additions. The last block: neutral values alone."""

    model: Any = None
    user: Any = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: Count = 0
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Texts = None
    stop_token_ids: list[TokenId] | None = None
    no_stop_trim: bool | None = False
    skip_special_tokens: bool | None = True
    rid: str | None = None
    trajectory: str | None = None
    task: str = ""
    return_token_ids: bool = False

    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    n: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    lora_path: Any = None


class CompletionBody(Common, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[TokenId]
    max_tokens: Positive | None = 16
    logprobs: int | None = None
    best_of: Any = None
    echo: Any = None
    suffix: Any = None


class ChatBody(Common, forbid_unknown_fields=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    skip_special_tokens: bool | None = None
    """Without it: not where there are tools, since many models say with such tokens that they call one."""
    top_logprobs: Any = None
    functions: Any = None
    response_format: Any = None


_PASSED = ("top_p", "top_k", "min_p", "ignore_eos", "logit_bias")
_REFUSED = Common.__struct_fields__[Common.__struct_fields__.index("frequency_penalty") :]
_REFUSED_COMPLETION = ("best_of", "echo", "suffix")
_REFUSED_CHAT = ("top_logprobs", "functions", "response_format")


def asked_completion(body: bytes, headers: Mapping[str, str], offset: int) -> tuple[Asked, Form]:
    """A completion's request. RefusedError when it is not usable."""
    given = _decoded(body, CompletionBody, _REFUSED + _REFUSED_COMPLETION)
    if given.logprobs is not None and given.logprobs > 1:
        raise wrong(f"logprobs={given.logprobs}: the journal keeps those of the tokens that were chosen; give 0 or 1")
    prompt = {"text" if isinstance(given.prompt, str) else "prompt": given.prompt}
    made = _asked(given, headers, given.max_tokens, **prompt)
    return made, _form(given, given.logprobs is not None, offset, "completion")


def asked_chat(body: bytes, headers: Mapping[str, str], offset: int, tokenizer: Tokenizer | None) -> tuple[Asked, Form]:
    """A chat completion's request. RefusedError when it is not usable."""
    given = _decoded(body, ChatBody, _REFUSED + _REFUSED_CHAT)
    if given.response_format and given.response_format != {"type": "text"}:
        raise wrong("response_format: a grammar cannot be kept when an engine is replaced; leave it out")
    options = dict(given.chat_template_kwargs or {})
    if tools := _tools(given):
        options["tools"] = tools
        given.skip_special_tokens = bool(given.skip_special_tokens)
    text = need(tokenizer).chat([_message(message) for message in given.messages], options)
    limit = given.max_tokens if given.max_completion_tokens is None else given.max_completion_tokens
    made = _asked(given, headers, limit, text=text, adds_special_tokens=False)
    return made, _form(given, bool(given.logprobs), offset, "chat")


def _tools(given: ChatBody) -> list[dict[str, Any]]:
    """What the chat template is to show the model. RefusedError: no functions, or the model would have to be forced."""
    tools = given.tools or []
    for tool in tools:
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or "name" not in function:
            raise wrong(f"tools: {tool!r} is no function; give objects of type function, with a function and its name")
    if given.tool_choice not in (None, "auto", "none") or given.parallel_tool_calls is False:
        raise wrong(
            "tool_choice and parallel_tool_calls: a grammar would have to force the model, and none can be kept when "
            "an engine is replaced; leave them out, or give tool_choice auto or none"
        )
    if tools and "tools" in (given.chat_template_kwargs or {}):
        raise wrong("tools are given twice, also in chat_template_kwargs; give them once")
    return [] if given.tool_choice == "none" else tools


def _message(given: dict[str, Any]) -> dict[str, Any]:
    """As chat templates take it: a tool call's arguments are an object, where OpenAI has its JSON; no null content."""
    made = {**given, "content": "" if given.get("content") is None else given["content"]}
    if calls := given.get("tool_calls"):
        try:
            made["tool_calls"] = [{**call, "function": _function(call["function"])} for call in calls]
        except (KeyError, TypeError, msgspec.DecodeError) as error:
            raise wrong(f"tool_calls: not as OpenAI has them, with function, name and arguments ({error!r})") from None
    return made


def _function(given: dict[str, Any]) -> dict[str, Any]:
    arguments = given["arguments"]
    return {**given, "arguments": msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments}


def need(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer, or RefusedError that says how to get one."""
    if tokenizer is None:
        raise wrong("this gateway has no tokenizer: start it with --tokenizer FOLDER, or use /generate with token ids")
    return tokenizer


def _decoded(body: bytes, kind: type[Any], refused: tuple[str, ...]) -> Any:
    try:
        given = msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise wrong(f"the body is not a request that this gateway takes: {error}") from None
    only_neutral("", {name: getattr(given, name) for name in refused})
    return given


def _asked(given: Common, headers: Mapping[str, str], max_tokens: int | None, **prompt: Any) -> Asked:
    others = {name: value for name in _PASSED if (value := getattr(given, name)) is not None}
    if given.seed is not None:
        others["sampling_seed"] = given.seed
    return request.asked(
        given, given, headers, max_new_tokens=max_tokens, min_new_tokens=given.min_tokens, others=others, **prompt
    )


def _form(given: Common, logprobs: bool, offset: int, kind: Any) -> Form:
    usage = given.stream_options is not None and given.stream_options.include_usage
    return Form(given.stream, logprobs, offset, usage, given.return_token_ids, kind)


def whole(answer: Answer, form: Form, part: Part, head: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The answer to a request that is not streamed."""
    choice = _choice(answer, form, part, tokenizer)
    text = choice.pop("said")
    choice |= {"message": {"role": "assistant", "content": text}} if form.kind == "chat" else {"text": text}
    return {**head, "object": _OBJECT[form.kind], "choices": [choice], "usage": _usage(answer)}


def pieces(
    answer: Answer, form: Form, part: Part, head: Mapping[str, Any], tokenizer: Tokenizer
) -> Iterator[dict[str, Any]]:
    """The chunks of a stream for these tokens; with the usage last, when it was asked for and this is the end."""
    choice = _choice(answer, form, part, tokenizer)
    text = choice.pop("said")
    if form.kind == "chat":
        choice["delta"] = {"role": "assistant", "content": text} if part.start == 0 else {"content": text}
    else:
        choice["text"] = text
    chunk = {**head, "object": _OBJECT_STREAMED[form.kind]}
    yield {**chunk, "choices": [choice], **({"usage": None} if form.usage else {})}
    if form.usage and part.finish is not None:
        yield {**chunk, "choices": [], "usage": _usage(answer)}


_OBJECT = {"completion": "text_completion", "chat": "chat.completion"}
_OBJECT_STREAMED = {"completion": "text_completion", "chat": "chat.completion.chunk"}


def _choice(answer: Answer, form: Form, part: Part, tokenizer: Tokenizer) -> dict[str, Any]:
    assert answer.text is not None
    token_ids = answer.token_ids[part.start : part.stop].tolist()
    choice: dict[str, Any] = {
        "index": 0,
        "said": answer.text.between(part.start, part.stop, part.finish is not None),
        "finish_reason": None if part.finish is None else part.finish.kind,
        "logprobs": None,
    }
    if form.logprobs:
        texts = [tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]
        choice["logprobs"] = _logprobs(form, texts, answer.logprobs[part.start : part.stop].tolist())
    if form.token_ids:
        choice["token_ids"] = token_ids
    return choice


def _logprobs(form: Form, texts: list[str], logprobs: list[float]) -> dict[str, Any]:
    if form.kind == "completion":
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": None}
    pairs = zip(texts, logprobs, strict=True)
    return {
        "content": [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in pairs
        ]
    }


def _usage(answer: Answer) -> dict[str, int]:
    prompt, completion = len(answer.prompt), len(answer.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
