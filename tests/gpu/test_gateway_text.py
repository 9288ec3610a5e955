"""Text while it comes: the same however its tokens arrive, and never a piece of a stop string."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer.errors import InputError
from belayer.gpu.gateway.text import Text, Tokenizer
from belayer.gpu.recorded_prefix import ASSISTANT, END, USER, TokenRecording
from tests.gpu.gateway_site import Client, Site, site
from tests.gpu.gateway_tokenizer import write_tokenizer
from tests.waiting import DEADLINE_S

WORDS = ["hello", " world", "h", "é", "日本", "🙂", "<", "a\nb", " ", "or"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@given(parts=st.lists(st.sampled_from(WORDS), max_size=12), cuts=st.sets(st.integers(0, 60)))
def test_pieces_add_up_to_the_whole_wherever_they_are_cut(
    tokenizer: Tokenizer, parts: list[str], cuts: set[int]
) -> None:
    whole = "".join(parts)
    token_ids = tokenizer.encode(whole, special=False)
    text = Text(tokenizer)
    for token_id in token_ids:
        assert not text.push(token_id)
    text.end()
    places = sorted({0, len(token_ids), *(cut for cut in cuts if cut < len(token_ids))})
    pieces = [text.between(a, b, b == len(token_ids)) for a, b in itertools.pairwise(places)]
    assert "".join(pieces) == whole and not any("\ufffd" in piece for piece in pieces)


@given(
    parts=st.lists(st.sampled_from(WORDS), max_size=12),
    stops=st.lists(st.sampled_from(["o w", "hell", "本🙂", "\nb", "d<", "or"]), min_size=1, max_size=3),
    trims=st.booleans(),
)
def test_text_ends_at_the_first_stop_string_and_nothing_of_it_came_before(
    tokenizer: Tokenizer, parts: list[str], stops: list[str], trims: bool
) -> None:
    whole = "".join(parts)
    text = Text(tokenizer, stops, trims)
    said = ""
    for count, token_id in enumerate(tokenizer.encode(whole, special=False)):
        ended = text.push(token_id)
        said += text.between(count, count + 1, ended)
        if ended:
            break
    else:
        text.end()
        count = len(tokenizer.encode(whole, special=False))
        said += text.between(count, count, True)
    places = [at for stop in stops if (at := whole.find(stop)) >= 0]
    if not places:
        assert (said, text.matched) == (whole, None)
    else:
        assert text.matched is not None and text.matched in stops
        at = whole.find(text.matched)
        assert said == whole[: at if trims else at + len(text.matched)]


def test_half_a_character_at_the_end_is_said_and_an_end_token_is_not(tokenizer: Tokenizer) -> None:
    text = Text(tokenizer)
    first, *_ = tokenizer.encode("é", special=False)
    assert not text.push(first) and text.between(0, 1, False) == ""
    assert not text.push_last(END)
    text.end()
    assert text.between(0, 2, True) == "\ufffd"


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer.json: there is no such file"):
        Tokenizer(tmp_path).check()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="not a tokenizer"):
        Tokenizer(tmp_path).check()


# --- through the gateway -------------------------------------------------------------------------------------------

SAID = "hello world, hello é🙂 again and again\nObservation: nothing of this is said any more"
STOP = "\nObservation: nothing of this is said any"


@asynccontextmanager
async def speaking(
    folder: Path, tokenizer: Tokenizer, tokens_per_s: float, **settings: Any
) -> AsyncIterator[tuple[Site, Client]]:
    """A model that answers `SAID` to a user who says 'hi'."""
    prompt = [USER, *b"hi", END, ASSISTANT]
    turn = [*tokenizer.encode(SAID, special=False), END]
    async with site(folder, tokens_per_s=tokens_per_s, recording=TokenRecording("s", prompt, [turn])) as made:
        await made.worker(shadow=True)
        async with made.gateway(tokenizer=tokenizer, **settings) as client:
            yield made, client


async def test_a_stop_string_across_the_resume_is_seen(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The engine dies when half of the stop string is out; only the gateway has seen both halves."""
    async with speaking(tmp_path, tokenizer, 300) as (made, client):
        before = SAID[: SAID.index(STOP)]
        half = len(tokenizer.encode(before + STOP[:6], special=False))
        body = {"text": "<user>hi<end><assistant>", "sampling_params": {"max_new_tokens": 500, "stop": [STOP, "zzz"]}}
        made.hold(half)
        async with client.stream(**body, rid="a") as stream:
            await stream.read(half)
            os.kill(await made.main_pid(), signal.SIGKILL)
            made.release()
            await stream.read()
        assert stream.text == before and stream.info["resumes"] == 1
        assert stream.finish == {"type": "stop", "matched": STOP}
        assert stream.tokens == tokenizer.encode(before + STOP, special=False)
        again = await client.ask(**body, rid="a")
        assert again.body["text"] == before and again.body["meta_info"]["finish_reason"] == stream.finish
        assert await made.findings() == []


async def test_completions_and_chat_are_openais(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with speaking(tmp_path, tokenizer, 2000) as (_, client):
        prompt, count = "<user>hi<end><assistant>", len(tokenizer.encode(SAID, special=False)) + 1
        whole = await client.ask("/v1/completions", prompt=prompt, max_tokens=500, logprobs=1, return_token_ids=True)
        [choice] = whole.body["choices"]
        assert (choice["text"], choice["finish_reason"]) == (SAID, "stop") and whole.body["object"] == "text_completion"
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"]) == count
        assert whole.body["usage"] == {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count}
        messages = [{"role": "user", "content": "hi"}]
        chat = await client.ask("/v1/chat/completions", messages=messages, logprobs=True, stop=STOP, model="any")
        [choice] = chat.body["choices"]
        assert choice["message"] == {"role": "assistant", "content": SAID[: SAID.index(STOP)]}
        assert len(choice["logprobs"]["content"]) == chat.body["usage"]["completion_tokens"]
        options = {"messages": messages, "max_completion_tokens": 12, "stream_options": {"include_usage": True}}
        async with client.stream("/v1/chat/completions", **options) as stream:
            await stream.read()
        *chunks, usage = stream.events
        said = [chunk["choices"][0] for chunk in chunks]
        assert said[0]["delta"]["role"] == "assistant" and said[-1]["finish_reason"] == "length"
        assert SAID.startswith("".join(choice["delta"]["content"] for choice in said))
        assert usage["usage"]["completion_tokens"] == 12 and usage["choices"] == []
        assert (await client.get("/v1/models")).body["data"][0]["id"] == "default"


async def test_a_completion_that_is_read_in_two_halves_has_all_its_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with speaking(tmp_path, tokenizer, 300, grace_s=DEADLINE_S) as (made, client):
        body = {"prompt": "<user>hi<end><assistant>", "max_tokens": 500, "rid": "a", "stop": STOP}
        made.hold(20)
        async with client.stream("/v1/completions", **body) as first:
            await first.read(events=1)
            assert not first.done
            seen, offset = first.events[:], first.offset
        made.release()
        async with client.stream("/v1/completions", **body, headers={"Last-Event-ID": str(offset)}) as rest:
            await rest.read()
    text = "".join(event["choices"][0]["text"] for event in [*seen, *rest.events])
    assert text == SAID[: SAID.index(STOP)]


async def test_the_next_turn_of_a_chat_keeps_the_tokens_that_came(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Tokenized again, 'hello' would be one token where the model said two."""
    prompt, odd = [USER, *b"hi", END, ASSISTANT], [*b"hel", *b"lo", END]
    later = [*prompt, *odd, USER, *b"next", END, ASSISTANT]
    assert tokenizer.encode("hello", special=False) != odd[:-1]
    async with site(tmp_path, recording=TokenRecording("s", prompt, [odd, [*b"ok", END]])) as made:
        await made.worker()
        async with made.gateway(tokenizer=tokenizer) as client:
            messages = [{"role": "user", "content": "hi"}]
            first = await client.ask("/v1/chat/completions", messages=messages, trajectory="t")
            said = first.body["choices"][0]["message"]
            messages += [said, {"role": "user", "content": "next"}]
            second = await client.ask("/v1/chat/completions", messages=messages, trajectory="t")
            assert second.body["choices"][0]["message"]["content"] == "ok"
            assert second.body["usage"]["prompt_tokens"] == len(later)
            assert await made.findings() == []


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SHOWN = '<system>[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]<end>'


async def test_tools_are_shown_to_the_model_and_its_call_is_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The second turn is as OpenAI's callers write it down: arguments as JSON, null content."""
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    first = SHOWN + "<user>hi<end><assistant>"
    again = first + '<call>look{"at": "x"}<end><tool>seen<end><assistant>'
    said = [*tokenizer.encode('<call>look{"at": "x"}', special=False), END]
    tool_turn = tokenizer.encode("<tool>seen<end><assistant>", special=False)
    prompt = tokenizer.encode(first, special=False)
    recording = TokenRecording("s", prompt, [said, [*b"ok", END]])
    assert tokenizer.encode(again, special=False) == [*prompt, *said, *tool_turn]
    async with site(tmp_path, recording=recording) as made:
        await made.worker()
        async with made.gateway(tokenizer=tokenizer) as client:
            messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
            body = {"messages": messages, "tools": [TOOL], "tool_choice": "auto", "trajectory": "t"}
            answer = await client.ask("/v1/chat/completions", **body)
            assert answer.body["choices"][0]["message"]["content"] == '<call>look{"at": "x"}'
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": "1", "content": "seen"})
            answer = await client.ask("/v1/chat/completions", **body)
            assert answer.body["choices"][0]["message"]["content"] == "ok", answer
            unshown = await client.ask("/v1/chat/completions", **{**body, "tool_choice": "none", "trajectory": "u"})
            assert unshown.status == 400, "without the tools the prompt is not the recording's"


WRONG = [
    ("/v1/chat/completions", {"messages": [{"role": "nosuch", "content": ""}]}, "no such role"),
    ("/v1/chat/completions", {"messages": [], "tools": [{"type": "function"}]}, "is no function"),
    ("/v1/chat/completions", {"messages": [], "tools": [TOOL], "tool_choice": "required"}, "give tool_choice auto"),
    ("/v1/chat/completions", {"messages": [], "tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ("/v1/chat/completions", {"messages": [], "tools": [TOOL], "chat_template_kwargs": {"tools": []}}, "given twice"),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "tool_calls: not as"),
    ("/v1/chat/completions", {"messages": [], "top_logprobs": 2}, "top_logprobs=2"),
    ("/v1/completions", {"prompt": "x", "n": 2}, "n=2"),
    ("/v1/completions", {"prompt": "x", "logprobs": 5}, "give 0 or 1"),
    ("/v1/completions", {"prompt": ["x", "y"]}, "Expected `int`"),
]


async def test_what_cannot_be_kept_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with speaking(tmp_path, tokenizer, 300) as (made, client):
        for path, body, said in WRONG:
            answer = await client.ask(path, **body)
            assert answer.status == 400 and said in answer.error, answer
        async with made.gateway() as plain:
            answer = await plain.ask("/v1/chat/completions", messages=[])
            assert answer.status == 400 and "--tokenizer" in answer.error
