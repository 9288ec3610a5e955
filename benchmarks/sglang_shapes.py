"""Models of real shapes with made-up weights, for measuring an engine where no real weights are at hand.

SGLang's own dummy weights make a model whose logits are all nearly equal, so that its tokens say nothing about
whether two runs agree. The weights here give varied tokens: norms are one, matrices keep the variance of their input,
embeddings are small enough that a token does not repeat itself. They are a plugin for SGLang (entry point group
`sglang.srt.plugins`), active only with BELAYER_BENCH_WEIGHTS=1 and `--load-format dummy`.
"""

# SGLang's packages are not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from belayer.gpu.sglang_cpu import QWEN3

_END_TOKEN = 2
_COMMON = {
    **QWEN3,
    "max_position_embeddings": 40960,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": _END_TOKEN,
    "head_dim": 128,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **_COMMON,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    },
    "4b": {
        **_COMMON,
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 9728,
        "tie_word_embeddings": True,
    },
    "32b": {
        **_COMMON,
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 25600,
        "tie_word_embeddings": False,
    },
}
"""Qwen3's published shapes (4B and 32B), and a tiny one for the CPU."""


def checkpoint_weights(shape: str, seed: int, device: str) -> dict[str, Any]:
    """Varied weights under the names of a Hugging Face checkpoint, the same for one seed and kind of device."""
    import torch

    sizes = SHAPES[shape]
    hidden, wide, vocabulary = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    heads = sizes["num_attention_heads"] * sizes["head_dim"]
    kv_heads = sizes["num_key_value_heads"] * sizes["head_dim"]
    dtype = getattr(torch, sizes["torch_dtype"])
    places: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    if not sizes["tie_word_embeddings"]:
        places["lm_head.weight"] = (vocabulary, hidden)
    for layer in range(sizes["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        places |= {f"{at}.input_layernorm.weight": (hidden,), f"{at}.post_attention_layernorm.weight": (hidden,)}
        places |= {f"{at}.self_attn.{name}_norm.weight": (sizes["head_dim"],) for name in "qk"}
        places |= {f"{at}.self_attn.q_proj.weight": (heads, hidden), f"{at}.self_attn.o_proj.weight": (hidden, heads)}
        places |= {f"{at}.self_attn.{name}_proj.weight": (kv_heads, hidden) for name in "kv"}
        places |= {f"{at}.mlp.{name}_proj.weight": (wide, hidden) for name in ("gate", "up")}
        places[f"{at}.mlp.down_proj.weight"] = (hidden, wide)
    weights: dict[str, Any] = {}
    for number, (name, place) in enumerate(places.items()):
        weights[name] = tensor = torch.empty(place, dtype=dtype, device=device)
        _vary(name, tensor, seed * 10_000 + number)
    return weights


def write_model(folder: Path, shape: str) -> Path:
    """A model folder with a configuration and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=1))
    return folder


def write_plugins(folder: Path) -> Path:
    """A folder for PYTHONPATH that makes SGLang find Belayer's plugin and this one, where neither is installed."""
    info = folder / "belayer_bench-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: belayer-bench\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nbelayer = belayer.gpu.plugin:register\n"
        "belayer_bench = benchmarks.sglang_shapes:register\nbelayer_zombie = benchmarks.zombie:register\n"
    )
    return folder


def register() -> None:
    """SGLang calls this in each of its processes."""
    if os.environ.get("BELAYER_BENCH_WEIGHTS") != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.model_loader.weight_utils.initialize_dummy_weights"
    HookRegistry.register(target, _varied_weights, HookType.REPLACE)
    # SGLang gathers logits through NVLink multicast where it finds it. Without this it does so by NCCL.
    gatherer = "sglang.srt.distributed.device_communicators.triton_symm_mem_ag.MultimemAllGatherer"
    HookRegistry.register(f"{gatherer}._build", _no_multicast, HookType.REPLACE)


def _no_multicast(*_: Any, **__: Any) -> None:
    """No state: NCCL is used."""


def _varied_weights(model: Any, *_: Any, **__: Any) -> None:
    import torch

    for number, (name, tensor) in enumerate(model.state_dict().items()):
        if not torch.is_floating_point(tensor):
            continue
        _vary(name, tensor, 1234 + number)


def _vary(name: str, tensor: Any, seed: int) -> None:
    import torch

    generator = torch.Generator(device=tensor.device).manual_seed(seed)
    if tensor.dim() < 2:
        tensor.fill_(1.0)
    elif "embed" in name or "lm_head" in name:
        tensor.normal_(0.0, 0.25, generator=generator)
        tensor[_END_TOKEN].zero_()  # its logit is 0, far below the best: no stream ends by itself
    else:
        tensor.normal_(0.0, tensor.shape[1] ** -0.5, generator=generator)
