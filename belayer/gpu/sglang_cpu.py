"""A real SGLang on a machine without a GPU: where it is installed, a small model for it, and how to start it.

The model is Qwen3 in miniature with made-up weights. Its tokens mean nothing, but they vary and depend on the whole
context, so that two runs which agree to the token have computed the same. Weights and arithmetic are fp32. The same
arguments always give the same files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import sys
from array import array
from collections.abc import Mapping
from pathlib import Path

from belayer.errors import InputError

PYTHON_VARIABLE = "BELAYER_SGLANG_PYTHON"
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
QWEN3: Mapping[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_cache": True,
    "use_sliding_window": False,
}
"""What every size of that model has in its config.json."""
_LAYERS, _HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _FEED_FORWARD = 2, 64, 4, 2, 16, 128
_EMBEDDING_SCALE = 0.25
"""Small enough that a token does not repeat itself."""


def find_python() -> Path | None:
    """The interpreter that has SGLang: $BELAYER_SGLANG_PYTHON, or the checkout's .venv-sglang; None without either."""
    named = os.environ.get(PYTHON_VARIABLE)
    path = Path(named) if named else Path(__file__).resolve().parents[2] / ".venv-sglang" / "bin" / "python"
    return path if path.exists() else None


def need_python() -> Path:
    """The same; InputError that says how to get one."""
    path = find_python()
    if path is None:
        named = os.environ.get(PYTHON_VARIABLE)
        found = f"{PYTHON_VARIABLE} names {named}, which is not there" if named else "SGLang is not installed here"
        raise InputError(f"{found}; install it with scripts/sglang_cpu.sh or set {PYTHON_VARIABLE} to its interpreter")
    return path


def arguments(model: Path, *, tokens: int, requests: int) -> list[str]:
    """SGLang's: room for that many tokens and running requests. No token ends a generation, only its length does."""
    return [
        *("--model-path", str(model), "--device", "cpu", "--dtype", "float32"),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *("--max-total-tokens", str(tokens), "--max-running-requests", str(requests), "--random-seed", "1"),
        *("--skip-tokenizer-init", "--skip-server-warmup", "--incremental-streaming-output", "--sleep-on-idle"),
    ]


def write_model(folder: Path, *, vocabulary: int, context: int) -> Path:
    """A model folder as SGLang loads it: config.json and model.safetensors. `context`: its most tokens a request."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **QWEN3,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "hidden_size": _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "intermediate_size": _FEED_FORWARD,
        "vocab_size": vocabulary,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "model.safetensors").write_bytes(_safetensors(_shapes(vocabulary)))
    return folder


def _shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, _HIDDEN)}
    query, key = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    for layer in range(_LAYERS):
        inside = {
            "input_layernorm": (_HIDDEN,),
            "self_attn.q_proj": (query, _HIDDEN),
            "self_attn.k_proj": (key, _HIDDEN),
            "self_attn.v_proj": (key, _HIDDEN),
            "self_attn.o_proj": (_HIDDEN, query),
            "self_attn.q_norm": (_HEAD_DIM,),
            "self_attn.k_norm": (_HEAD_DIM,),
            "post_attention_layernorm": (_HIDDEN,),
            "mlp.gate_proj": (_FEED_FORWARD, _HIDDEN),
            "mlp.up_proj": (_FEED_FORWARD, _HIDDEN),
            "mlp.down_proj": (_HIDDEN, _FEED_FORWARD),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in inside.items()}
    return shapes | {"model.norm.weight": (_HIDDEN,), "lm_head.weight": (vocabulary, _HIDDEN)}


def _safetensors(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """Format: https://github.com/huggingface/safetensors, a JSON header and the tensors' bytes, little endian."""
    header: dict[str, object] = {}
    parts: list[bytes] = []
    at = 0
    for name, shape in shapes.items():
        data = _weights(name, shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    return b"".join((struct.pack("<Q", len(text)), text, *parts))


def _weights(name: str, shape: tuple[int, ...]) -> bytes:
    """Norms are one; matrices keep their input's variance. Numbers are uniform, made from the tensor's name."""
    count = math.prod(shape)
    if len(shape) == 1:
        values = array("f", [1.0]) * count
    else:
        deviation = _EMBEDDING_SCALE if "embed" in name or "lm_head" in name else shape[1] ** -0.5
        scale = deviation * math.sqrt(3.0) / 32768
        numbers = array("h", hashlib.shake_128(name.encode()).digest(2 * count))
        if sys.byteorder == "big":
            numbers.byteswap()
        values = array("f", (number * scale for number in numbers))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
