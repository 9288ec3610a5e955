"""Token ids to text while they come, stop strings in it, and text to token ids.

Invariant: the text that is out after n tokens depends on these n tokens alone, not on how they arrived. So a stream
that a caller resumes after n tokens goes on with exactly the text that is missing. Text that may be the beginning of
a stop string, or of a character, waits for the token that decides it.

Needs the package `tokenizers` (and `jinja2` for chat), imported when a tokenizer is first used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from belayer.errors import InputError
from belayer.gpu.gateway.errors import wrong

_UNFINISHED = "\ufffd"
"""What tokenizers decode the beginning of a character to."""


class Tokenizer:
    """A folder with tokenizer.json, as model repositories have it; tokenizer_config.json for chat."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self) -> None:
        """InputError when it cannot be loaded."""
        _ = self._tokenizer

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer as Loaded

        path = self._folder / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{path}: there is no such file; --tokenizer names a folder that has one")
        try:
            loaded = Loaded.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the package raises nothing more precise
            raise InputError(f"{path}: not a tokenizer: {error}") from None
        loaded.no_truncation()
        loaded.no_padding()
        return loaded

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids; with the tokenizer's own first and last tokens when `special`."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of these tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def chat(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        """The text with which the model's chat template asks for the next message."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._marks, **options)
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001 - a template is someone else's program
            raise wrong(f"the model's chat template refuses these messages: {error}") from None

    @cached_property
    def _config(self) -> dict[str, Any]:
        path = self._folder / "tokenizer_config.json"
        return json.loads(path.read_bytes()) if path.is_file() else {}

    @cached_property
    def _marks(self) -> dict[str, str]:
        marks = {name: self._config.get(f"{name}_token") for name in ("bos", "eos", "pad", "unk")}
        texts = {name: mark.get("content") if isinstance(mark, dict) else mark for name, mark in marks.items()}
        return {f"{name}_token": text for name, text in texts.items() if text}

    @cached_property
    def _template(self) -> Any:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        file = self._folder / "chat_template.jinja"
        source = file.read_text() if file.is_file() else self._config.get("chat_template")
        if isinstance(source, list):
            source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
        if not source:
            raise wrong(f"{self._folder} has no chat template; use /v1/completions or /generate with the whole prompt")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(source)


def _raise(message: str) -> None:
    raise ValueError(message)


class Text:
    """The text of one answer, token by token."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), trims_stops: bool = True, skips_special: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._trims = trims_stops
        self._skips_special = skips_special
        self._longest = max(map(len, stops), default=0)
        self._window: list[int] = []
        """The tokens whose text is decoded together: some that are known, then the newest."""
        self._known = ""
        self._known_tokens = 0
        self._said = ""
        self._safe: list[int] = [0]
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, token_id: int) -> bool:
        """Add one token; True when a stop string is complete, and the answer with it."""
        self._window.append(token_id)
        whole = self._tokenizer.decode(self._window, self._skips_special)
        if not whole.endswith(_UNFINISHED):
            self._add(whole)
        self._safe.append(self._safe_length())
        return self.matched is not None

    def push_last(self, token_id: int) -> bool:
        """Add the token that ended the answer: no part of its text, unless a stop string is complete with it."""
        if self._trims:
            before = self._window[:], self._known, self._known_tokens, self._said
            if self.push(token_id):
                return True
            self._window, self._known, self._known_tokens, self._said = before
            self._safe.pop()
            self._end()
            self._safe.append(len(self._said))
            return False
        return self.push(token_id)

    def end(self) -> None:
        """No more tokens come: nothing needs to wait any longer."""
        self._end()

    def between(self, start: int, stop: int, final: bool) -> str:
        """The text that tokens `start` to `stop` added; `final`: with what waited for the end."""
        begin, end = self._safe[start], self._safe[stop]
        return self._said[begin : len(self._said) if final else end]

    def _end(self) -> None:
        if self.matched is None and len(self._window) > self._known_tokens:
            self._add(self._tokenizer.decode(self._window, self._skips_special))

    def _add(self, whole: str) -> None:
        before = len(self._said)
        self._said += whole[len(self._known) :]
        newest = self._window[self._known_tokens :]
        self._window, self._known_tokens = newest, len(newest)
        self._known = self._tokenizer.decode(newest, self._skips_special)
        self._match(max(0, before - self._longest + 1))

    def _match(self, start: int) -> None:
        found = [(at, stop) for stop in self._stops if (at := self._said.find(stop, start)) >= 0]
        if found:
            at, self.matched = min(found)
            self._said = self._said[: at if self._trims else at + len(self.matched)]

    def _safe_length(self) -> int:
        """How much of the text no stop string can take back."""
        if self.matched is None:
            for length in range(min(self._longest - 1, len(self._said)), 0, -1):
                tail = self._said[-length:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return len(self._said) - length
        return len(self._said)
