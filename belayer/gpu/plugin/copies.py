"""Copies from the host to the device that the host does not wait for."""

from __future__ import annotations

# torch, CUDA's bindings and SGLang are the engine's, not in this project's own environment.
# pyright: reportMissingImports=false
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


_LEAST_NUMBERS = 512
"""Small copies all take blocks of one size, of which a shadow's rehearsal leaves some: the driver makes none then."""


def to_device(numbers: torch.Tensor, device: Any) -> torch.Tensor:
    """A row of numbers on the device: what is launched afterwards finds it there.

    From pinned memory, which torch keeps and gives again: a copy from other memory waits for the device.
    """
    import torch

    if str(device) == "cpu":
        return numbers
    count = numbers.numel()
    size = max(count, _LEAST_NUMBERS)
    pinned = torch.empty(size, dtype=numbers.dtype, device="cpu", pin_memory=True)[:count]
    return pinned.copy_(numbers).to(device, non_blocking=True)
