"""Where each parameter and buffer of a model lies in the weights region."""

from __future__ import annotations

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false
import hashlib
import logging
from typing import Any

from belayer.gpu import wire
from belayer.gpu.arena import ArenaMapper, round_up
from belayer.gpu.errors import UnsupportedEngineError

_log = logging.getLogger("belayer")
_TENSOR_ALIGNMENT_BYTES = 512


class Layout:
    """The places of one model's tensors. A tensor that several modules share lies there once."""

    def __init__(self, model: Any) -> None:
        self._places: list[tuple[dict[str, Any], str, Any, int]] = []
        offsets: dict[int, int] = {}
        digest = hashlib.blake2b(digest_size=16)
        end = 0
        for module_name, module in model.named_modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in offsets:
                        offsets[id(tensor)] = end
                        end += round_up(tensor.numel() * tensor.element_size(), _TENSOR_ALIGNMENT_BYTES)
                    offset = offsets[id(tensor)]
                    self._places.append((tensors, name, tensor, offset))
                    digest.update(f"{module_name}.{name} {tuple(tensor.shape)} {tensor.dtype} {offset}\n".encode())
        self.size_bytes = max(end, 1)
        self.spec: wire.Spec = {"tensors": len(self._places), "layout": digest.hexdigest()}

    def move(self, mapper: ArenaMapper, address: int, *, copy: bool) -> None:
        """Put every tensor at its place in the region, with its contents when `copy`."""
        import torch

        moved: dict[int, torch.Tensor] = {}
        new_parameters: dict[int, torch.Tensor] = {}
        for tensors, name, tensor, offset in self._places:
            if id(tensor) not in moved:
                place = mapper.tensor(address + offset, tuple(tensor.shape), tensor.dtype)
                if copy:
                    place.copy_(tensor.data)
                moved[id(tensor)] = place
            place = moved[id(tensor)]
            if not isinstance(tensor, torch.nn.Parameter):
                tensors[name] = place
            elif tensor.device.type == "meta":
                if id(tensor) not in new_parameters:
                    # A meta parameter cannot be given other data; its loader attributes must come along.
                    parameter = torch.Tensor._make_subclass(type(tensor), place, False)
                    parameter.__dict__.update(tensor.__dict__)
                    new_parameters[id(tensor)] = parameter
                tensors[name] = new_parameters[id(tensor)]
            else:
                tensor.data = place


def build_without_memory(loader: Any, model_config: Any) -> Any:
    """The model's structure on torch's meta device, and SGLang's cache of rotary embeddings as it was before."""
    import torch
    from sglang.srt.layers.rotary_embedding.factory import _ROPE_DICT
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    quantization = _get_quantization_config(model_config, loader.load_config)
    if quantization is not None:
        raise UnsupportedEngineError("the model", f"quantized ({type(quantization).__name__})", "unquantized models")
    ropes = dict(_ROPE_DICT)
    with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
        model = _initialize_model(model_config, loader.load_config, None)
    _ROPE_DICT.clear()
    _ROPE_DICT.update(ropes)
    for module_name, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                _log.warning("belayer: %s.%s is a tensor outside parameters and buffers: not mapped", module_name, name)
    return model
