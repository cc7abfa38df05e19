"""Experts in MXFP4, the format of the OCP microscaling specification (v1.0): e2m1 numbers in blocks
of 32 columns, which share a power of two.

A weight is its number times the power of its block, rounded to the dtype of x: exact but in
float16. x is never rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.kernels.linear.e2m1 import E2M1_STD, numbers_of, untiled
from minisgl.kernels.linear.quantized import CHUNK
from minisgl.kernels.moe.quantized_experts import QuantizedExperts
from minisgl.kernels.moe.reference import Clamped, Expert, ExpertBiases, activated

BLOCK = 32  # columns that share a power of two
EXPONENT_BIAS = 127
# Powers of two that a scale may be. The kernels multiply with them in bfloat16, and with others on
# the way; smaller ones count as 0.
LEAST_EXPONENT, LARGEST_EXPONENT = -68, 65


class Mxfp4Weights(NamedTuple):
    """The matrices of all experts. n is a multiple of GROUP, k of CHUNK."""

    data: Tensor  # [num_experts, n, k / 4] int16: the bits of four numbers, as from `tiled`
    # [num_experts, k / CHUNK, n] int32: two bfloat16 numbers, the first block's in the lower half
    scale: Tensor

    @staticmethod
    def allocate(num_experts: int, n: int, k: int) -> Mxfp4Weights:
        """Uninitialised weights, on torch's default device."""
        return Mxfp4Weights(
            torch.empty((num_experts, n, k // 4), dtype=torch.int16),
            torch.empty((num_experts, k // CHUNK, n), dtype=torch.int32),
        )

    def named(self, name: str) -> dict[str, Tensor]:
        return {name: self.data, f"{name}_scale": self.scale}

    def expert(self, index: int) -> Mxfp4Weights:
        return Mxfp4Weights(self.data[index], self.scale[index])

    def dequantized(self) -> Tensor:
        both = self.scale[..., None].view(torch.bfloat16)  # [..., k / CHUNK, n, 2]
        scale = both.float().transpose(-3, -2).flatten(-2)
        return numbers_of(untiled(self.data)) * scale.repeat_interleave(BLOCK, dim=-1)

    def fill_randomly(self, std: float, generator: torch.Generator) -> None:
        for words in self.data:
            words.random_(-(1 << 15), 1 << 15, generator=generator)
        exponent = EXPONENT_BIAS + round(math.log2(std / E2M1_STD))
        blocks = torch.full((self.scale.shape[2], 2 * self.scale.shape[1]), exponent)
        self.scale.copy_(packed_scales(blocks).to(self.scale.device))


def packed_scales(exponents: Tensor) -> Tensor:
    """The scales of Mxfp4Weights [..., k / CHUNK, n], from exponents [..., n, k / BLOCK] as they
    are stored: uint8, EXPONENT_BIAS more than those of the powers of two."""
    exponent = exponents.to(torch.int32) - EXPONENT_BIAS
    assert int(exponent.max()) <= LARGEST_EXPONENT
    power = torch.exp2(exponent.float()).to(torch.bfloat16)
    power = torch.where(exponent < LEAST_EXPONENT, 0.0, power)
    pairs = power.contiguous().view(torch.int32)
    return pairs.mT.contiguous()


class Mxfp4Experts(QuantizedExperts):
    """Experts whose matrices are in MXFP4, and their biases in the dtype of x."""

    gate_up: Mxfp4Weights
    down: Mxfp4Weights

    def __init__(
        self,
        gate_up: Mxfp4Weights,
        down: Mxfp4Weights,
        biases: ExpertBiases | None = None,
        clamped: Clamped | None = None,
    ) -> None:
        super().__init__(gate_up, down)
        self.biases = biases
        self.clamped = clamped

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return {**super().weights, **({} if self.biases is None else self.biases.named)}

    def expert(self, index: int) -> Expert:
        def product(weights: Mxfp4Weights, bias: Tensor | None, x: Tensor) -> Tensor:
            matrix = weights.expert(index).dequantized().to(x.dtype).float()
            added = None if bias is None else bias[index].float()
            return F.linear(x.float(), matrix, added).to(x.dtype)

        up_bias, down_bias = self.biases or (None, None)
        return Expert(
            partial(product, self.gate_up, up_bias),
            partial(activated, clamped=self.clamped),
            partial(product, self.down, down_bias),
        )
