"""SGLang's `/generate`: its request, and its answer as SGLang gives it with --incremental-streaming-output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from belayer.gpu.gateway import request
from belayer.gpu.gateway.answer import Answer, Part
from belayer.gpu.gateway.errors import wrong
from belayer.gpu.gateway.request import Asked, Count, Form, Positive, Texts, TokenId, only_neutral


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """SGLang's. Those of the second block are taken at their neutral value alone."""

    max_new_tokens: Positive | None = 128
    min_new_tokens: Count | None = 0
    temperature: float | None = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    stop: Texts = None
    stop_token_ids: list[TokenId] | None = None
    no_stop_trim: bool | None = False
    skip_special_tokens: bool | None = True
    stream_interval: int | None = None

    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    n: Any = None
    stop_regex: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    spaces_between_special_tokens: Any = None
    custom_params: Any = None


_PASSED = ("top_p", "top_k", "min_p", "ignore_eos", "logit_bias", "sampling_seed")
_SAMPLING_REFUSED = SamplingParams.__struct_fields__[SamplingParams.__struct_fields__.index("frequency_penalty") :]


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True):
    """SGLang's GenerateReqInput, as far as it is offered. Those of the second block: at their neutral value alone."""

    input_ids: list[TokenId] | None = None
    text: str | None = None
    sampling_params: SamplingParams | None = None
    return_logprob: bool | None = False
    stream: bool | None = False
    rid: str | None = None
    trajectory: str | None = None
    """Belayer's own, for callers that cannot set the header."""
    task: str = ""
    log_metrics: Any = None
    model: Any = None

    logprob_start_len: Any = None
    top_logprobs_num: Any = None
    token_ids_logprob: Any = None
    return_text_in_logprobs: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    input_embeds: Any = None
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None


_REFUSED = GenerateBody.__struct_fields__[GenerateBody.__struct_fields__.index("logprob_start_len") :]


def asked(body: bytes, headers: Mapping[str, str], offset: int) -> tuple[Asked, Form]:
    """The request and the form of its answer. RefusedError when it is not usable."""
    try:
        given = msgspec.json.decode(body, type=GenerateBody)
    except msgspec.DecodeError as error:
        raise wrong(f"the body is not a request to /generate: {error}") from None
    sampling = given.sampling_params or SamplingParams()
    only_neutral("", {name: getattr(given, name) for name in _REFUSED})
    only_neutral("sampling_params.", {name: getattr(sampling, name) for name in _SAMPLING_REFUSED})
    if (given.input_ids is None) == (given.text is None):
        raise wrong("give either input_ids (a list of token ids) or text, for one request; lists of them are not taken")
    made = request.asked(
        given,
        sampling,
        headers,
        prompt=given.input_ids,
        text=given.text,
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        others={name: value for name in _PASSED if (value := getattr(sampling, name)) is not None},
    )
    return made, Form(bool(given.stream), bool(given.return_logprob), offset)


def event(answer: Answer, form: Form, part: Part) -> dict[str, Any]:
    """One event of a stream; for a whole answer, the part that is everything."""
    token_ids = answer.token_ids[part.start : part.stop].tolist()
    info: dict[str, Any] = {
        "id": answer.asked.rid,
        "finish_reason": None if part.finish is None else part.finish.sglang(),
        "prompt_tokens": len(answer.prompt),
        "completion_tokens": part.stop,
        "weight_version": str(answer.version_at(part.stop)),
        "resumes": answer.resumes,
    }
    if form.logprobs:
        logprobs = answer.logprobs[part.start : part.stop].tolist()
        info["output_token_logprobs"] = [[value, token, None] for value, token in zip(logprobs, token_ids, strict=True)]
    said: dict[str, Any] = {"output_ids": token_ids, "meta_info": info}
    if answer.text is not None:
        said["text"] = answer.text.between(part.start, part.stop, part.finish is not None)
    return said
