"""Random weights, for benchmarks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from minisgl.kernels.linear.quantized import (
    E4M3_MAX,
    Fp8Weights,
    QuantizedWeights,
    pack_int4,
)
from minisgl.kernels.moe.mxfp4 import E2M1, EXPONENT_BIAS, Mxfp4Weights, packed_scales
from minisgl.layers.experts import FusedExperts
from minisgl.layers.linear import Linear
from minisgl.models.quantized_matrix import quantized_weights

_FP8_STD = 64.0  # of random e4m3 numbers: 7 times as much saturates
_E2M1_STD = (sum(number**2 for number in E2M1) / len(E2M1)) ** 0.5
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
            _draw(weights, num_inputs**-0.5, generator)
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


def _draw(weights: QuantizedWeights | Mxfp4Weights, std: float, generator: torch.Generator) -> None:
    """Random numbers with a standard deviation of `std`, or nearly."""
    device = weights.data.device
    if isinstance(weights, Mxfp4Weights):
        for words in weights.data:
            words.random_(-(1 << 15), 1 << 15, generator=generator)
        exponent = EXPONENT_BIAS + round(math.log2(std / _E2M1_STD))
        blocks = torch.full((weights.scale.shape[2], 2 * weights.scale.shape[1]), exponent)
        weights.scale.copy_(packed_scales(blocks).to(device))
        return
    if isinstance(weights, Fp8Weights):
        for matrix in weights.data if weights.data.dim() == 3 else [weights.data]:
            numbers = torch.randn(matrix.shape, generator=generator, device=device)
            matrix.copy_((_FP8_STD * numbers).clamp(-E4M3_MAX, E4M3_MAX))
        weights.scale.fill_(std / _FP8_STD)
        return
    for packed in weights.data if weights.data.dim() == 3 else [weights.data]:
        shape = packed.shape[0], 4 * packed.shape[1]
        # From 1 to 15, whose mean is the zero point.
        numbers = torch.randint(1, 16, shape, generator=generator, dtype=torch.uint8, device=device)
        packed.copy_(pack_int4(numbers))
    weights.scale.fill_(std / math.sqrt((15**2 - 1) / 12))
    if weights.zero is not None:
        weights.zero.fill_(8)
