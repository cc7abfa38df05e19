"""Random weights, for benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minisgl.layers.experts import FusedExperts
from minisgl.layers.linear import Linear
from minisgl.models.quantization import quantized_weights

_FACTORS = frozenset(("weight", "per_expert_scale", "layer_scalar"))
_INPUT_SCALE = 1 / 32  # inputs up to 14


def fill_randomly(model: nn.Module, device: torch.device, seed: int) -> None:
    """Seeded weights, scaled so that activations keep their size and logits stay moderate."""
    generator = torch.Generator(device).manual_seed(seed)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # part of a checkpoint
                buffer.zero_()
        quantized = quantized_weights(module)
        for weights, num_inputs in quantized:
            weights.fill_randomly(num_inputs**-0.5, generator)
        for name, weight in module.named_parameters(recurse=False):
            if name.endswith("input_scale"):
                weight.fill_(_INPUT_SCALE)
            elif quantized and not name.endswith("bias"):
                continue
            elif weight.dim() < 2 or name.endswith("_bias"):  # of a norm, or a bias of any kind
                adds_one = getattr(module, "adds_one", False)
                weight.fill_(1.0 if name in _FACTORS and not adds_one else 0.0)
            else:
                weight.normal_(std=_num_inputs(module, name, weight) ** -0.5, generator=generator)


def _num_inputs(module: nn.Module, name: str, weight: Tensor) -> int:
    """The number of inputs of the whole linear map, of which `weight` may be a rank's part."""
    if isinstance(module, Linear):
        return module.inputs.whole
    if isinstance(module, FusedExperts) and name == "down_proj":
        return module.inner.whole
    return weight.shape[-1]
