"""A tokenizer for tests: the 256 bytes, the recorded engine's role tokens, and some words; with a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from belayer.gpu.gateway.text import Tokenizer

SPECIAL = ["<system>", "<user>", "<assistant>", "<tool>", "<call>", "<end>", *(f"<reserved{n}>" for n in range(10))]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ġwor l", "Ġworl d"]
TEMPLATE = (
    "{%- if tools %}<system>{{ tools | tojson }}{{ eos_token }}{% endif -%}"
    "{%- for message in messages %}"
    "{%- if message.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('no such role') }}{% endif -%}"
    "<{{ message.role }}>{{ message.content }}"
    "{%- for call in message.tool_calls %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{%- endfor %}{{ eos_token }}"
    "{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(folder: Path) -> Tokenizer:
    """The folder as a model repository has it."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {_shown(byte): byte for byte in range(256)}
    vocabulary |= {token: 256 + at for at, token in enumerate(SPECIAL)}
    vocabulary |= {merge.replace(" ", ""): 272 + at for at, merge in enumerate(MERGES)}
    added = [
        {"id": 256 + at, "content": token, "special": True, "single_word": False, "lstrip": False}
        | {"rstrip": False, "normalized": False}
        for at, token in enumerate(SPECIAL)
    ]
    pieces = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocabulary, "merges": MERGES, "byte_fallback": False}
    whole = {"version": "1.0", "added_tokens": added, "pre_tokenizer": pieces, "decoder": pieces, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    config = {"eos_token": {"content": "<end>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(folder)


def _shown(byte: int) -> str:
    """GPT-2's printable stand-in for a byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [other for other in range(256) if other not in printable].index(byte))
